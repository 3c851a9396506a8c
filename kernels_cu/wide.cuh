// Rows so long that all blocks of the launch share each: what the kernels of both passes have in common (backward_wide.cu,
// forward_wide.cu). One block on a multiprocessor, with the same columns of all rows.
//
// Rows come in steps of kStepRows, through a ring in shared memory that bulk copies fill. A thread has kVectors vectors of kRows rows
// of each step. Once a step blocks exchange their rows' sums, through memory, which here is the L2 cache; what is written of a row
// comes kBehind steps after its sums, and is found from the ring again. As every block waits for every other one's sums, all keep
// the same pace, and all must run at the same time: the launch is a cooperative one.
//
// Who works on rows waits for nobody's answer: beside these warps, one fills the ring, one puts together what they have posted and
// stores it for the other blocks, and kReaders read what all blocks have stored, and put that together. Where the first did the
// others' work, too, by turns, each waited for the L2 cache (backward, 25 MB, N=262144, two H200s, RMSNorm 17.1 → 15.4 us, LayerNorm
// 19.2 → 18.4).
//
// Nothing orders stores and reads but the sums themselves: the last bit of the first says in which lap of the entries they were
// stored, together. At first entries are zero, which is nobody's in the first lap. A launch leaves them as they are, and makes those
// zero that the next one will use: there are two regions. A block stores the sums of step j + kLaps when it has those of all blocks
// of the step kBehind + 1 before, which each of them stored when it had those of step j, or of a later one: nobody waits for these
// any more. Who waits for step j + kLaps has read, in the same place, those of step j, and so finds nothing older, whose last bit is
// the same.
//
// Expects X, kLayerNorm, kVector, kVectors, kSpreadsEntries and float sums. Compile-time switches (config/wide.py has their numbers):
//   ROW_WARPS  warps of a block that share a row     OFF_LINES  1: rows do not all begin at whole lines of memory (staged.cuh)
//   WIDE_…     warps that work on rows and rows of each, stages, steps behind, warps that read sums, laps of entries, blocks at
//              least and at most, bytes of a region, of the state (at most) and of the arguments
#pragma once

#include "columns.cuh"
#include "pipeline.cuh"
#include "reduce.cuh"
#include "slab.cuh"

#ifndef OFF_LINES
#define OFF_LINES 0
#endif

static_assert(VECTOR && sizeof(Compute) == 4, "vectors, and float sums");
constexpr int kWarps = WIDE_WARPS, kThreads = 32 * kWarps;  // that work on rows
constexpr int kRowWarps = ROW_WARPS, kGroups = kWarps / kRowWarps;
constexpr int kRows = WIDE_ROWS, kStepRows = kGroups * kRows;
static_assert(kStepRows <= 32 && kWarps * kRows <= 32, "a lane for each row, and for each warp's part of one");

// Steps of the ring, and from a row's sums to what is written of it: one is at work, others wait for their sums, or are on their way.
constexpr int kStages = WIDE_STAGES, kBehind = WIDE_BEHIND;
static_assert(kStages > kBehind + 1, "rows that wait leave room for others");
// Warps that read, in turn, each all blocks' sums of a step, and for so many of these: a multiprocessor's block, and its rows.
constexpr int kReaders = WIDE_READERS, kMostBlocks = WIDE_MOST_BLOCKS, kReads = (kStepRows * kMostBlocks + 31) / 32;
// Of a lane's reads, the first so many are of blocks that any launch has, none of them its last one.
constexpr int kSureReads = kStepRows * (WIDE_LEAST_BLOCKS - 1) / 32;
constexpr int kAllThreads = kThreads + 64 + 32 * kReaders;

// A warp that posts sums j has collected those of step j − kBehind − 1, which all blocks then had stored.
constexpr int kSlots = 8, kLaps = WIDE_LAPS;  // of sums in a block, and of entries in memory: powers of two
static_assert(kSlots >= kBehind + 2 && kLaps >= 2 * kBehind + 2, "nobody still reads what is overwritten");
static_assert((kLaps & (kLaps - 1)) == 0, "steps are counted without end");
static_assert(kLaps % kReaders == 0, "a lane reads a place in each lap, and so never misses one whose last bit would be the same");

// What blocks exchange, zero before the first launch that uses it; launches that do follow one another, of either pass.
constexpr int kRegionBytes = WIDE_REGION_BYTES;
struct alignas(128) WideMemory {
    unsigned launches;
    alignas(128) char regions[2][kRegionBytes];
};

struct WideState {
    Barrier::State full[kStages], done[kStages];    // a step of the ring has arrived; all warps are done with it
    Barrier::State summed[kSlots], there[kSlots];   // all warps have posted a step's sums; readers have those of all blocks
    Sums<float> warps[kSlots][kStepRows * kRowWarps];
    Sums<float> totals[kSlots][kStepRows];
    unsigned launches;
};
static_assert(sizeof(WideState) <= WIDE_STATE_BYTES, "a block has so many beside what it gets dynamically");

// An entry: a row's sums in one block, the second for LayerNorm alone. The first has its lap's parity, 1 in the first lap, for its
// last bit, which is no part of the sum: that so has a bit less, the same in any lap, and is infinite if it was.
struct Entry {
    unsigned first, second;

    __device__ static unsigned parity(int j) { return ~(unsigned(j) / kLaps) & 1; }
    Entry() = default;
    __device__ Entry(const Sums<float>& sums, int j)
        : first((__float_as_uint(sums.first) & ~1u) | parity(j)), second(__float_as_uint(sums.second)) {}
    __device__ bool is_of(int j) const { return ((first ^ parity(j)) & 1) == 0; }
    // So that it is none of step j.
    __device__ void forget(int j) { first = ~parity(j); }
    __device__ Sums<float> sums() const { return {__uint_as_float(first & ~1u), kLayerNorm ? __uint_as_float(second) : 0.0f}; }
    // Both at once.
    __device__ void load(const char* source) {
        if constexpr (kLayerNorm) {
            unsigned long long both;
            asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(both) : "l"(source) : "memory");
            first = unsigned(both);
            second = unsigned(both >> 32);
        } else {
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(first) : "l"(source) : "memory");
        }
    }
    __device__ void store(char* target) const {
        if constexpr (kLayerNorm) {
            const unsigned long long both = (unsigned long long)(second) << 32 | first;
            asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(target), "l"(both) : "memory");
        } else {
            asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(target), "r"(first) : "memory");
        }
    }
};
// From an entry to the next. Of steps of one or two rows a block's entries are spread, where kSpreadsEntries says so, so that few blocks
// store to one sector of memory: backward, 1 GB, RMSNorm, float32, 262144, 524288 246.2 → 236.8, 264.7 → 240.2 us, LayerNorm 240.4 →
// 237.7, 249.3 → 239.7.
constexpr int kEntryBytes = kSpreadsEntries && kStepRows <= 2 ? 16 : kLayerNorm ? 8 : 4;
static_assert(kLaps * kStepRows * kMostBlocks * kEntryBytes <= kRegionBytes, "the Python side makes room for it");

// The entries of a launch: for each of kLaps steps those of each block, of each row of a step.
struct Entries {
    char* region;
    int count;  // of a step

    __device__ char* at(int j, int number) const { return region + (unsigned(j) % kLaps * count + number) * kEntryBytes; }
};

// Adds up a number of each lane, by a butterfly over distances from kLeast to less than kBelow.
template <int kLeast, int kBelow> __device__ void sum_of_lanes(float& number) {
#pragma unroll
    for (int distance = kBelow / 2; distance >= kLeast; distance /= 2) number += __shfl_xor_sync(0xffffffffu, number, distance);
}

// Adds up, over the lanes of a warp, each of kCount numbers (a power of two), of which lane i then has number i / (32 / kCount): half of
// the lanes go on with half of the numbers.
template <int kCount> __device__ float sum_numbers(float (&numbers)[kCount], int lane) {
    int distance = 16;
#pragma unroll
    for (int half = kCount / 2; half > 0; half /= 2) {
        const bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float own = upper ? numbers[half + i] : numbers[i], other = upper ? numbers[i] : numbers[half + i];
            numbers[i] = own + __shfl_xor_sync(0xffffffffu, other, distance);
        }
        distance /= 2;
    }
    float sum = numbers[0];
#pragma unroll
    for (int rest = 16 / kCount; rest > 0; rest /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, rest);
    return sum;
}

// How many columns a part of a row has, as what puts parts together takes them; none: there is no such part.
struct PartColumns {
    float columns, reciprocal;

    PartColumns() = default;
    __device__ explicit PartColumns(int columns) : columns(columns), reciprocal(columns ? 1.0f / columns : 0.0f) {}
};

// Arguments has kArrays arrays that go through the ring, array(i) of X and stride(i), in elements, and whether sums are exchanged();
// beside its part of a row of the first array a block has kWords words of 16 bytes from the whole row, each from column word(i) on.
// Combine puts a row's parts, of so many columns in all, together: put_together<kCount>(part_of, columns, columns_of, add_up), of the
// lane's kCount parts, whose sums and columns the functions tell, and of other lanes', over which add_up(number) is. total(sums, row,
// words) makes of a row's sums what is wanted of them.
template <class Arguments, class Combine> struct WideBlock {
    static constexpr int kArrays = Arguments::kArrays, kWords = Arguments::kWords;
    using Word = Packed<X, 16 / int(sizeof(X))>;

    const Arguments& a;
    WideState& state;
    char* const ring;
    const Slab slab;
    Barrier full, done, summed, there;

    __device__ WideBlock(const Arguments& a, WideState& state, char* ring)
        : a(a), state(state), ring(ring), slab(a), full{shared_address(state.full)}, done{shared_address(state.done)},
          summed{shared_address(state.summed)}, there{shared_address(state.there)} {}

    // A place of the ring, of which step j is in place j % kStages.
    struct Place {
        int stage = 0, parity = 0;
        __device__ void advance() {
            if (++stage == kStages) {
                stage = 0;
                parity ^= 1;
            }
        }
    };

    // Columns of the block's slab that a warp has, of those that share a row.
    __device__ int columns_of_warp(int warp) const {
        constexpr int kSpan = 32 * kVector;
        int columns = 0;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            const int left = slab.columns - (k * kRowWarps + warp) * kSpan;
            columns += left < 0 ? 0 : minimum(left, kSpan);
        }
        return columns;
    }

    // By all threads: load() and work(warp) by the warps that work on rows, the first while the ring's first steps come.
    template <class Load, class Work> __device__ void run(Load load, Work work) const {
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
        const unsigned long long policy = cache_policy(a.read_once);
        if (warp == kWarps && elect_lane()) start(policy);
        if (warp < kWarps) load();
        __syncthreads();

        if (warp < kWarps) {
            work(warp);
        } else if (warp == kWarps) {
            if (elect_lane()) keep_filling(policy);
        } else if (a.exchanged()) {
            if (warp == kWarps + 1) send(lane);
            else read(warp - kWarps - 2, lane);
        }
        // This block has all blocks' sums, so all have read which region to use.
        __syncthreads();
        if (a.exchanged() && blockIdx.x == 0 && threadIdx.x == 0) {
            asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(&memory().launches), "r"(state.launches + 1) : "memory");
        }
    }

    // Rows of a warp's that step j has; in the last step, but of steps of one row, there may be less than kRows, none, or a number below.
    __device__ int rows_of(int j, int group_row) const {
        return kStepRows == 1 || j + 1 < a.steps ? kRows : int(a.rows - int64(j) * kStepRows) - group_row;
    }
    // In a place of the ring, of step j: array i's row group_row of the step, from the block's column `column` on.
    __device__ X* in_ring(int stage, int i, int j, int group_row, int column) const {
        X* const place = reinterpret_cast<X*>(ring + stage * place_bytes()) + i * part_elements();
        return place + group_row * pitch() + column + lead(a.array(i), a.stride(i), int64(j) * kStepRows + group_row);
    }
    // And its first word.
    __device__ const Word* words_in_ring(int stage, int row) const {
        return reinterpret_cast<const Word*>(place(stage) + row_parts_bytes()) + row * kWords;
    }
    __device__ char* place(int stage) const { return ring + stage * place_bytes(); }

    // A warp's sums of its part of a row of step j.
    __device__ Sums<float>& posted(int j, int row, int warp) const {
        return state.warps[slot(j)][row * kRowWarps + warp % kRowWarps];
    }
    // By all lanes, when they have posted all of the warp's.
    __device__ void post(int j, int lane) const {
        __syncwarp();
        if (lane == 0) summed[slot(j)].arrive();
    }
    __device__ void wait_for_totals(int j) const { there[slot(j)].wait(parity(j)); }
    __device__ Sums<float> total(int j, int row) const { return state.totals[slot(j)][row]; }
    // By all lanes, when the warp no longer needs the place.
    __device__ void leave(int stage, int lane) const {
        __syncwarp();
        if (lane == 0) done[stage].arrive();
    }

private:
    // In elements, from one row of a step to the next in the ring, where with OFF_LINES each is as far from a line's start as in
    // memory; and what a place has of one array.
    __device__ int pitch() const { return a.slab_columns + (OFF_LINES ? 128 / int(sizeof(X)) : 0); }
    __device__ int part_elements() const { return kStepRows * pitch(); }
    __device__ static int lead(const X* base, int64 stride, int64 row) {
        const unsigned address = unsigned(reinterpret_cast<unsigned long long>(base)) + unsigned(row * stride) * unsigned(sizeof(X));
        return OFF_LINES ? address % 128 / sizeof(X) : 0;  // slabs are of whole lines
    }
    __device__ int row_parts_bytes() const { return kArrays * part_elements() * int(sizeof(X)); }
    // Whole lines, as its parts.
    static constexpr int kWordsBytes = (kStepRows * kWords * int(sizeof(Word)) + 127) / 128 * 128;
    __device__ int place_bytes() const { return row_parts_bytes() + kWordsBytes; }
    __device__ static int slot(int j) { return unsigned(j) % kSlots; }
    __device__ static int parity(int j) { return unsigned(j) / kSlots & 1; }
    __device__ WideMemory& memory() const { return *static_cast<WideMemory*>(a.exchange); }
    __device__ Entries entries() const {
        return {memory().regions[state.launches & 1], kStepRows * int(gridDim.x)};
    }

    // By one thread.
    __device__ void start(unsigned long long policy) const {
        for (int i = 0; i < kStages; ++i) {
            full[i].init(1);
            done[i].init(kWarps);
        }
        for (int i = 0; i < kSlots; ++i) {
            summed[i].init(kWarps);
            there[i].init(1);
        }
        fence_barrier_init();
        fill(0, 0, policy);
        unsigned launches;
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(launches) : "l"(&memory().launches) : "memory");
#pragma unroll 1
        for (int j = 1; j < minimum(kStages, a.steps); ++j) fill(j, j, policy);
        state.launches = launches;
    }
    __device__ void fill(int stage, int j, unsigned long long policy) const {
        const int64 first_row = int64(j) * kStepRows;
        const int rows = j + 1 < a.steps ? kStepRows : int(a.rows - first_row);
        const int bytes = slab.columns * int(sizeof(X));
        const X* source[kArrays];
#pragma unroll
        for (int i = 0; i < kArrays; ++i) source[i] = a.array(i) + first_row * a.stride(i) + slab.first_column;
        SharedAddress target = shared_address(ring) + stage * place_bytes();
        SharedAddress word = target + row_parts_bytes();
        full[stage].arrive_expecting(rows * (kArrays * bytes + kWords * int(sizeof(Word))));
#pragma unroll 1
        for (int row = 0; row < rows; ++row) {
#pragma unroll
            for (int i = 0; i < kArrays; ++i) {
                const int from_line = lead(a.array(i), a.stride(i), first_row + row);
                bulk_copy(target + (i * part_elements() + from_line) * sizeof(X), source[i], bytes, full[stage], policy);
            }
#pragma unroll
            for (int i = 0; i < kWords; ++i, word += sizeof(Word)) {
                bulk_copy(word, source[0] - slab.first_column + a.word(i), sizeof(Word), full[stage]);
            }
#pragma unroll
            for (int i = 0; i < kArrays; ++i) source[i] += a.stride(i);
            target += pitch() * sizeof(X);
        }
    }
    // By one thread, which has filled the first places.
    __device__ void keep_filling(unsigned long long policy) const {
        Place place;
#pragma unroll 1
        for (int j = kStages; j < a.steps; ++j) {
            done[place.stage].wait(place.parity);
            fill(place.stage, j, policy);
            place.advance();
        }
    }
    // By one warp: the block's sums, as all its warps have posted them.
    __device__ void send(int lane) const {
        const Entries entries = this->entries();
        const Combine combine(a);
        const PartColumns columns(columns_of_warp(lane % kRowWarps));
        const bool first_lane = lane % kRowWarps == 0 && lane < kStepRows * kRowWarps;
        const int number = blockIdx.x * kStepRows + lane / kRowWarps;
#pragma unroll 1
        for (int j = 0; j < a.steps; ++j) {
            summed[slot(j)].wait(parity(j));
            const Sums<float> part = state.warps[slot(j)][minimum(lane, kStepRows * kRowWarps - 1)];
            const auto add_up = [](float& number) { sum_of_lanes<1, kRowWarps>(number); };
            const Sums<float> sums =
                combine.template put_together<1>([&](int) { return part; }, slab.columns, [&](int) { return columns; }, add_up);
            if (first_lane) Entry(sums, j).store(entries.at(j, number));
        }
    }
    // By each of kReaders warps, which take turns: all blocks' sums of a step. A lane has entries of one row.
    __device__ void read(int reader, int lane) const {
        const Entries entries = this->entries();
        const Combine combine(a);
        const int last = int(gridDim.x) - 1;
        const PartColumns of_last(a.columns - last * a.slab_columns), of_others(a.slab_columns);
        clear_other_region(reader, lane);
        const auto number = [&](int i) { return i * 32 + lane; };
        const auto is_sure = [](int i) { return i < kSureReads; };
#pragma unroll 1
        for (int j = reader; j < a.steps; j += kReaders) {
            const int later = minimum(j + a.lag, a.steps - 1);
            summed[slot(later)].wait(parity(later));
            Entry read[kReads];
#pragma unroll
            for (int i = 0; i < kReads; ++i) read[i].forget(j);
            bool all = false;
            while (!all) {
                all = true;
#pragma unroll
                for (int i = 0; i < kReads; ++i) {
                    if (!read[i].is_of(j)) read[i].load(entries.at(j, is_sure(i) ? number(i) : minimum(number(i), entries.count - 1)));
                }
#pragma unroll
                for (int i = 0; i < kReads; ++i) all &= read[i].is_of(j);
                all = __all_sync(0xffffffffu, all);
            }
            const auto part_of = [&](int i) {
                return is_sure(i) || number(i) < entries.count ? read[i].sums() : Sums<float>{0.0f, 0.0f};
            };
            const auto columns_of = [&](int i) {
                if (is_sure(i) || number(i) / kStepRows < last) return of_others;
                return number(i) < entries.count ? of_last : PartColumns(0);
            };
            const auto add_up = [](float& number) { sum_of_lanes<kStepRows, 32>(number); };
            const Sums<float> sums = combine.template put_together<kReads>(part_of, a.columns, columns_of, add_up);
            if (lane < kStepRows) {  // step j is in the ring as long as its totals are not there
                const Word* const words = words_in_ring(j % kStages, lane);
                state.totals[slot(j)][lane] = combine.total(sums, int64(j) * kStepRows + lane, words);
            }
            __syncwarp();
            if (lane == 0) there[slot(j)].arrive();
        }
    }
    __device__ void clear_other_region(int reader, int lane) const {
        uint4* const other = reinterpret_cast<uint4*>(memory().regions[~state.launches & 1]);
        for (int i = (blockIdx.x * kReaders + reader) * 32 + lane; i < kRegionBytes / 16; i += gridDim.x * kReaders * 32) {
            other[i] = {};
        }
    }
};

// A thread's vectors, of a block's columns, that the warps of a row share.
struct WideColumns {
    unsigned thread;
    int first, columns;         // the block's
    bool warp_lacks[kVectors];  // no thread of the warp holds it, nor those behind it

    __device__ WideColumns(unsigned thread, int columns) : thread(thread), columns(columns) {
        first = thread % (32 * kRowWarps) * kVector;
        const int first_of_warp = __shfl_sync(0xffffffffu, first, 0);
#pragma unroll
        for (int k = 0; k < kVectors; ++k) warp_lacks[k] = k > 0 && first_of_warp + k * kRowWarps * 32 * kVector >= columns;
    }
    __device__ int lane() const { return thread % 32; }
    __device__ int at(int k) const { return first + k * kRowWarps * 32 * kVector; }
    __device__ bool holds(int k) const { return thread < kThreads && at(k) < columns; }
    // Who has no column reads one all the same.
    __device__ int readable(int k) const { return holds(k) ? at(k) : 0; }
};
