// Forward pass for rows that the blocks of a cluster hold in registers (compute capability 9.0 and newer): y, mean and rstd.
//
// How rows are split, staged and walked: staged.cuh. A thread takes its columns of a row from the ring into registers,
// whereupon the ring's place is filled again. Row j + 1 is taken and its sums posted before those of row j are awaited, so
// their exchange between warps and blocks hides behind work.
//
// Few rows have a kernel of their own (forward_few_rows.cu). A row's y has the same bits in both.
#include "forward_row.cuh"

// Vectors of each thread in shared memory, where registers do not hold them: a word of each thread, then the next word of
// each.
struct SharedVectors {
    static constexpr int kPerWord = minimum(kVector, 16 / int(sizeof(Compute))), kWords = kVector / kPerWord;  // of a vector
    using Word = Packed<Compute, kPerWord>;

    Compute* base;

    __device__ static constexpr int bytes(int vectors, int threads) {
        return vectors * kVector * int(sizeof(Compute)) * threads;
    }
    __device__ void put(int vector, const Compute (&values)[kVector]) const {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            Word word;
            word.pack(reinterpret_cast<const Compute(&)[kPerWord]>(values[i * kPerWord]));
            word.store(at(vector, i));
        }
    }
    __device__ void get(int vector, Compute (&values)[kVector]) const {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            Word word;
            word.load(at(vector, i));
            word.unpack(reinterpret_cast<Compute(&)[kPerWord]>(values[i * kPerWord]));
        }
    }

private:
    __device__ Compute* at(int vector, int word) const {
        return base + ((vector * kWords + word) * int(blockDim.x) + int(threadIdx.x)) * kPerWord;
    }
};

// Whether b lies in shared memory, so that with 24 and 32 columns a thread sixteen and twelve warps find room on a
// multiprocessor, not twelve and eight. LayerNorm, N=4096 at 1 GB 173.4 → 167.8 us, 2048 173.5 → 168.7, 3072 at 100 MB 25.7 →
// 24.3. Not with more columns (40: 5120 at 100 MB 25.1 → 26.8), nor in clusters (32768 at 1 GB, of 32 columns then, 168.5 →
// 199.7), nor in parts of a warp (N=128 at 1 GB 171.5 → 177.4), nor where there is little shared memory: _keeps_b_in_shared() of
// config/forward.py.
constexpr bool kBInShared = kLayerNorm && sizeof(X) == 2 && VECTOR && kWholeWarps && !kClustered &&
                            kColumnsPerThread <= 32 && __CUDA_ARCH__ < 1200;

// Threads on a multiprocessor that leave each the registers that it needs, as config/forward.py has it:
// in vectors for w, perhaps b, x of two rows, and some; off 16 bytes by what was timed, and what does not spill.
constexpr int kBytesOfColumn = (kBInShared ? 1 : 2) * int(sizeof(Compute)) + 2 * int(sizeof(X));
constexpr int kRegisters = kColumnsPerThread * kBytesOfColumn / 4 + (kLayerNorm ? 78 : 62);
constexpr int kVectorsAtOnce = kRegisters <= 128 ? 512 : kRegisters <= 170 ? 384 : kMaxThreads;
constexpr bool kMoreSingles = kLayerNorm && sizeof(X) == 2 && !PART_OF_WARP;
constexpr bool kLacksRegisters = ODD_ROWS == 3 && kLayerNorm && kColumnsPerThread == 20 && PART_OF_WARP;
constexpr bool kFewSingles = sizeof(X) > 2 && kColumnsPerThread * sizeof(Compute) == 64;
constexpr int kSinglesAtOnce = sizeof(X) == 8 || kFewSingles || __CUDA_ARCH__ >= 1000      ? kMaxThreads
                               : kLacksRegisters                                           ? 384
                               : kColumnsPerThread <= (kMoreSingles ? 24 : 20)             ? 512
                               : kColumnsPerThread <= (kMoreSingles ? 32 : 24)             ? 384
                                                                                           : kMaxThreads;
constexpr bool kPacked = VECTOR || (kVector > 1 && !kLayerNorm && sizeof(X) == 2);
constexpr int kThreadsAtOnce = kPacked ? kVectorsAtOnce : kSinglesAtOnce;

// b of a thread's columns, in registers or in shared memory.
struct Bias {
    // Whether b comes while the rows do: LayerNorm, 100 MB, N=4096 24.6 → 24.1 us, 8192 25.4 → 24.1, 16384 24.8 → 23.7, at
    // 1 GB up to 0.7% less. Parts of a warp lost: N=256 at 1 GB 176.0 → 180.2.
    static constexpr bool kLoadsAhead = kWholeWarps;

    Compute own[kVectors][kVector];
    SharedVectors shared;

    __device__ static constexpr int shared_bytes(int threads) {
        return kBInShared ? SharedVectors::bytes(kVectors, threads) : 0;
    }
    __device__ Bias(const void* first_column, int code, const Columns& at, void* shared_memory)
        : shared{static_cast<Compute*>(shared_memory)} {
        const auto column_of = [&](int i) { return loaded_column(at, i); };
        fill_columns(own, Compute(0));
        if constexpr (kLoadsAhead) load_columns_ahead(as_loaded(own), first_column, code, column_of);
        else load_columns(as_loaded(own), first_column, code, column_of);
    }
    // When it no longer matters that this waits for what was loaded.
    __device__ void settle() const {
        if constexpr (kBInShared) {
#pragma unroll
            for (int k = 0; k < kVectors; ++k) shared.put(k, own[k]);
        }
    }
    __device__ void get(int k, Compute (&b)[kVector]) const {
        if constexpr (kBInShared) {
            shared.get(k, b);
        } else {
#pragma unroll
            for (int v = 0; v < kVector; ++v) b[v] = own[k][v];
        }
    }
};

// The last rows of a long launch are not divided beforehand: under the load some multiprocessors get ahead, and these draw more
// of the last steps, each by a number that a counter hands out. What a row comes to does not depend on who does it. Numbers are
// drawn so early that the ring is never empty for want of one. Not by clusters: where their blocks met before each of these
// steps, they took 5 to 19% more; where numbers came by remote stores, 1 to 3% less at 1 GB, but up to 5% more at 100 MB. By
// LayerNorm's rows of a warp or less only where config/forward.py says so, for more instructions make their steps longer.
//
//   DRAW_SHORT_ROWS  1: LayerNorm's rows of a warp or less draw
#ifndef DRAW_SHORT_ROWS
#define DRAW_SHORT_ROWS 0
#endif
constexpr bool kDraws = !kClustered && (kWholeWarps || !kLayerNorm || DRAW_SHORT_ROWS);

struct ForwardWalk : RowWalk {
    static constexpr int kNumbers = 16;  // one for each place in the ring, the steps at work and the one before them
    static_assert(kNumbers >= kMaxStages + 3, "no number is overwritten that is still read");

    const ForwardArguments& a;
    const BlockShare& share;
    unsigned* numbers;  // of step j the number j % kNumbers, in shared memory
    unsigned drawn;     // of the thread that draws, the number that it announces next
    unsigned second;    // with draws_every_second(), whether the block's rows are the second ones of two
    int known;          // steps before this one are there
    int drawing;        // from this step on there is something to draw

    __device__ ForwardWalk(const ForwardArguments& a, const BlockShare& share, unsigned* numbers)
        : RowWalk(share, a.walk_rows, a.steps, gridDim.x / kCluster), a(a), share(share), numbers(numbers),
          second(share.walker & 1) {}

    // When the first copies are on their way, if there is something to draw.
    __device__ void start() {
        known = end;
        drawing = a.drawn_steps ? end - a.stages : 0x7fffffff;
        asm volatile("" : "+r"(known), "+r"(drawing));  // found here, once
        if (kDraws && a.drawn_steps && draws()) drawn = draw();
    }
    // Of a step that is known.
    __device__ bool has(int j) const { return j < known; }
    __device__ bool is_drawn(int j) const { return kDraws && j >= end; }
    __device__ int64 row(int j) const {
        if (!is_drawn(j)) return RowWalk::row(j);
        const unsigned number = numbers[unsigned(j) % kNumbers];
        return a.walk_rows + (draws_every_second() ? 2 * int64(number) + second : int64(number) * share.groups);
    }
    // By all threads of the walker, before step j: what follows in the ring when step j leaves it is known then.
    __device__ void look_ahead(int j) {
        unsigned& number = numbers[unsigned(j + a.stages) % kNumbers];
        if (draws()) {
            number = drawn;
            if (is_there(drawn)) drawn = draw();
        }
        __syncthreads();
        known += is_there(number);
    }

private:
    __device__ bool draws() const { return threadIdx.x == 0; }
    // Where all rows of a block are to start at the same half of a word, and it has one a step: as many blocks draw the second ones of
    // two rows as the first ones, from a counter of their own.
    __device__ bool draws_every_second() const { return kShifts && share.groups == 1; }
    __device__ unsigned steps_to_draw() const {
        return draws_every_second() ? (unsigned(a.drawn_steps) + 1 - second) / 2 : unsigned(a.drawn_steps);
    }
    __device__ bool is_there(unsigned number) const { return number < steps_to_draw(); }
    // When all steps are drawn, and every walker has found that there are no more, the counter is at 0 again.
    __device__ unsigned draw() const {
        StepCounter* const counter = a.counters + (draws_every_second() ? second : 0);
        const unsigned walkers = draws_every_second() ? gridDim.x / 2 : gridDim.x;
        return atomicInc(counter->steps, steps_to_draw() + walkers - 1);
    }
};

// Whether all that a row's origin is found from is where the row is. Else some of it is another team's, which may not be there yet,
// or another block's: each step asks memory for the next one's.
constexpr bool kOriginInRing = !kHasOrigin || (kMaxTeams == 1 && !kClustered);

// With two, LayerNorm at 100 MB took up to 3% more, RMSNorm up to 2%.
constexpr int kFirstSteps = 1;

// With so many steps of a walker or fewer LayerNorm asks for b before the rows, behind which loads wait. An H100, N=4096: one
// row 6.4 → 6.2 us, 6 MB, one step, 8.1 → 7.3, 12 MB, two, 9.6 → 9.0, but 25 MB, three, 11.7 → 11.9, 50 MB 16.9 → 17.6; in
// clusters of sixteen, 262144, 25 MB, two and three, 15.7 → 14.9; N=384, 6 MB, one, 8.1 → 7.7, 12 MB, one and two, 9.2 → 9.4.
constexpr int kMostStepsBehindB = !kWholeWarps ? 1 : kCluster < 16 ? 2 : 3;

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreadsAtOnce, 1)
    forward_staged(const ForwardArguments a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ BlockState state;
    __shared__ PaceState pace_state;
    __shared__ unsigned step_numbers[ForwardWalk::kNumbers];

    const BlockShare share(a, BlockColumns(a));
    ForwardWalk walk(a, share, step_numbers);
    const RingPart<X, false> x_part(a, share, a.x, a.x_row_stride, 0);
    char* const places = shared + Bias::shared_bytes(blockDim.x);
    const Ring<false> ring(places, state, share, a.stages, x_part.part_bytes, a.rows, walk);
    char* const ring_end = places + a.stages * x_part.part_bytes;
    const ColumnsAhead w_ahead(state, share, a.w, a.w_code, ring_end, dynamic_shared_bytes() - int(ring_end - shared));
    const bool b_first = kLayerNorm && a.b && walk.end <= kMostStepsBehindB;
    if (!b_first) ring.start<kFirstSteps>(walk, x_part);
    walk.start();
    const SumExchange<false> exchange(state, share, a.group_threads);
    exchange.start(share.thread);
    const PaceOf<PACED> pace(a, a.counters, pace_state, walk, share);
    if (!b_first) announce_barriers();

    const Columns own(share.thread, a.group_threads, share.columns,
                      shift_of_row(a.x + (walk.first + share.group) * a.x_row_stride));
    const PairsHeld held(own);
    Compute w[kVectors][kVector];
    fill_columns(w, Compute(1));
    const Bias bias(column_address(a.b, a.b_code, share.first_column), a.b_code, own, shared);
    if (b_first) {
        ring.start<kFirstSteps>(walk, x_part);
        announce_barriers();
    }
    wait_for_barriers();
    w_ahead.wait();
    ring.start_others<kFirstSteps>(walk, x_part);
    // What thread 0 wrote into PaceState: the cluster's barrier orders no writes (as in backward_staged.cu).
    if constexpr (PACED && kClustered) __syncthreads();
    load_columns(as_loaded(w), w_ahead.source, a.w_code, [&](int i) { return loaded_column(own, i); });
    bias.settle();

    RowWriter writer(own, held, a.y + (walk.first + share.group) * a.y_row_stride);
    const RowMoments<SumExchange<false>> moments(a, own, exchange);
    RingPlace place;
    Kept kept[kVectors], kept_before[kVectors];
    Sums<Compute> posted, posted_before;
    Origin asked = {};
    Compute origin = Compute(0), origin_before;
    const auto ask_for_origin = [&](int j) {
        if (kOriginInRing || !walk.has(j)) return;
        const int64 row = walk.row(j) + share.group;
        if (row < a.rows) asked.load(a.x + row * a.x_row_stride, a.columns);
    };
    ask_for_origin(0);
    int64 row = walk.first + share.group;  // of the step before
    const auto y_of_row = [&] { return writer.begin(a.y + row * a.y_row_stride + share.first_column, own); };
    X* y = y_of_row();
    // The sums of step j, then y of the step before it.
    for (int j = 0, more = true; more; ++j) {
        if (kDraws && j >= walk.drawing) {
            walk.look_ahead(j);
            if (walk.is_drawn(j - 1)) {
                row = walk.row(j - 1) + share.group;
                y = y_of_row();
            }
        }
        more = walk.has(j);
        const Columns at = own.found_anew();
        if (more) {
            if constexpr (!kOriginInRing) origin = asked.value();
            ask_for_origin(j + 1);
            ring.wait(place);
            const X* const x_row = x_part.in(ring.place(place.stage), share, walk.row(j));
            if constexpr (kOriginInRing) {
                asked.load(x_row, a.columns);
                origin = asked.value();
            }
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                kept[k].load(x_row + at.at(k), held.of(k, at.holds(k)));
                kept[k].less(origin, at.holds(k));
            }
            posted = moments.of_warp(kept, at, held);
            exchange.post_warp(posted, j, share.thread);
            ring.fill_again(place, walk, j, pace, x_part);
            place.advance(a.stages);
        }
        if (j > 0) {
            const bool active = row < a.rows;  // the last step may have more groups than rows
            const RowStatistics statistics = moments.of_row(j - 1, posted_before);
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                Compute b[kVector];
                bias.get(k, b);
                const Vector packed = normalized(kept_before[k], statistics, w[k], b);
                writer.put<false>(y, at, k, packed, active, at.holds(k));
            }
            writer.finish(y, at, active);
            if (active && share.thread == 0 && share.rank == 0) {
                a.rstd[row] = statistics.rstd;
                if constexpr (kLayerNorm) a.mean[row] = origin_before + statistics.mean;
            }
            y += walk.step * a.y_row_stride;
            row += walk.step;
        }
        posted_before = posted;
        origin_before = origin;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) kept_before[k] = kept[k];
    }
    pace.finish();
    leave_together();
}
