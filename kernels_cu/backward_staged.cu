// Backward pass for rows that fit in shared memory, of one block or of the blocks of a cluster or a gang (compute capability 9.0
// and newer).
//
// How rows are split, staged and walked: staged.cuh. From the ring in shared memory x and dy are read twice, for the first
// half of a row's work, its sums and dw and db, and for the second, dx. The first half of step j + 1 (in gangs j + 2) comes before
// the second half of step j, so the exchange of a row's sums, between warps and by remote stores between blocks, hides behind
// work.
//
// In registers: this thread's w, dw and db. In shared memory: the ring, the second level of dw and db (ColumnSums of
// backward.cuh; before that, and with DX_ALONE, w on its way), four slots of sums per group. To memory: x, dy and dx once; one
// partial row of dw and db for each block, cluster or gang, which the blocks together add up in the end (reduction.cuh). Orders of
// sums: a row over a thread's columns, over its lanes by a butterfly, over its warps and blocks likewise; a column over 16 rows,
// over these in turn, over the block's groups.
//
// With DX_ALONE walkers write dx alone: for calls that want no more, or because, where there is little data, the last blocks of
// the grid sum dw and db (column_blocks.cuh), and read x and dy once more. Few rows have a kernel of their own
// (backward_few_rows.cu). A row's dx has the same bits in all. A call compiles these three at the same time; one for dx alone has,
// in place of that with dw, one in which walkers that write dx alone can keep pace.
//
// What stands before the first copies is short. By stamps (RMSNorm, N=1024, 25 MB, an H100) the first rows are asked for 1730 cycles
// after a block starts, of which 760 go by until the first argument is there. What is waited for is asked for in the order in which
// it is needed: w by the block's last warp, rows by the first of each team, then statistics by each warp for itself.
#include "backward.cuh"
#include "column_blocks.cuh"
#include "gang.cuh"
#include "staged.cuh"

#ifndef DX_ALONE
#define DX_ALONE 0
#endif
constexpr bool kSumsColumns = !DX_ALONE;

// The statistics of a group's rows, as many steps ahead as the group has lanes in a warp: lane i loads those of the
// batch's row i.
struct StatisticsAhead {
    RowStatistics batch, next;
    int lanes;

    __device__ void load_next(const BackwardArguments& a, int64 first_row, unsigned step, int j) {
        const int64 row = first_row + int64(unsigned(j) + (threadIdx.x & unsigned(lanes - 1))) * step;
        if (row >= a.rows) return;
        next.load_in_place(a, row);  // else each warp would wait here: RMSNorm, N=128, 1 GB, 247.8 → 243.6 us
    }
    // To be called for each step in turn.
    __device__ RowStatistics of(const BackwardArguments& a, int64 first_row, unsigned step, int j) {
        const int lane = j & (lanes - 1);
        if (lane == 0) {
            batch = next.moved();
            load_next(a, first_row, step, j + lanes);
        }
        RowStatistics row;
        row.rstd = __shfl_sync(0xffffffffu, batch.rstd, lane, lanes);
        if constexpr (kLayerNorm) row.mean = __shfl_sync(0xffffffffu, batch.mean, lane, lanes);
        return row;
    }
};

// A group's row in the ring.
struct StagedRow {
    const X* x;
    const Dy* dy;
    int first;  // a column that is there

    // Calls work(k, x, dy, whether they are the thread's) for each of a thread's vectors; of an odd row what is not a column is
    // read, too, and PairsHeld says what is.
    template <class Work> __device__ void for_each_vector(const Columns& at, Work work) const {
        if constexpr (kReadsAll || kOddRows) {
            for_each(work, [&](int k) { return at.at(k); }, [&](int k) { return k >= at.skipped; });
        } else {
            for_each(work, [&](int k) { return at.readable(k, first); }, [&](int k) { return at.holds(k); });
        }
    }

private:
    template <class Work, class ColumnOf, class Holds>
    __device__ void for_each(Work work, ColumnOf column_of, Holds holds) const {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            XVector x_vector;
            DyVector dy_vector;
            x_vector.load(x + column_of(k));
            dy_vector.load(dy + column_of(k));
            work(k, x_vector, dy_vector, holds(k));
        }
    }
};

// Threads on a multiprocessor that leave each the registers that it needs: config/backward.py asks for no more.
constexpr int kColumnBytes = kColumnsPerThread * int(sizeof(Compute));
constexpr bool kFewRegisters = sizeof(X) < 4 || !kWantDb;
constexpr bool kManySingles = !kGang && kSumsColumns && !kLayerNorm && !kWantDb && sizeof(X) == 2 && kColumnBytes == 128;
constexpr int kVectorsAtOnce = kColumnsPerThread == 24 && kFewRegisters           ? 384
                               : !kWholeWarps && __CUDA_ARCH__ < 1200             ? 512
                                                                                  : kMaxThreads;
constexpr int kSinglesAtOnce = kColumnBytes < 64 || (kColumnBytes == 64 && __CUDA_ARCH__ < 1000) ? 512
                               : kColumnBytes <= 96 && kFewRegisters                             ? 384
                               : kManySingles && __CUDA_ARCH__ < 1000                            ? 384
                                                                                                 : kMaxThreads;
constexpr int kThreadsAtOnce = VECTOR ? kVectorsAtOnce : kSinglesAtOnce;

// LayerNorm with db whose blocks 28 columns a thread fill, or nearly, and which are no clusters: without what the two switches
// below do for 32 columns it takes less (N=7168, 1 GB, 244.0 → 240.2 us).
constexpr bool kFillsBlock = kColumnsPerThread == 28 && !kClustered && sizeof(X) == 2;

// Whether the second halves of the last two steps (where nobody meets, of the last one) come behind the partial row, in a
// loop of their own. LayerNorm with db gains where registers are few, in clusters (N=14336, 1 GB, 248 → 246 us), where pace is
// kept (N=8192, 100 MB, 39.6 → 37.9; 6144, 75 MB, 30.0 → 29.4), and off 16 bytes (12289, 100 MB, 44.4 → 43.8). RMSNorm gains in
// clusters and with 24 columns (100 MB, 12288, 34.5 → 34.1), not with more in one block. It takes some 10% longer to compile.
// Larger types were not timed.
constexpr bool kHoldsLayerNorm = kLayerNorm && kWantDb && (kClustered || !VECTOR || (PACED && !kFillsBlock));
constexpr bool kHoldsRmsNorm = !kLayerNorm && VECTOR && (kClustered || kColumnsPerThread == 24);
constexpr bool kHoldsBack = kSumsColumns && sizeof(X) == 2 && sizeof(Dy) == 2 && kWholeWarps && !kGang &&
                            (kHoldsLayerNorm || kHoldsRmsNorm);

// Steps from a row's first half to its second.
constexpr int kBehind = kGang ? kGangBehind : 1;

// Where that is not so: whether the partial row is on its way before the last of the block's dx, which is written meanwhile
// (RMSNorm, N=16384, 25 MB, 17.7 → 16.8 us, before it held back). Not where the compiler takes more registers for it (LayerNorm,
// 32 columns: 254, not 218), nor off 16 bytes in parts of a warp (N=129 64.9 → 66.2).
constexpr bool kPublishesInLoop = !kHoldsBack && (VECTOR ? kSplitsRows || !kWantDb : kWholeWarps && !kWantDb);

// Steps that are asked for first of all, which a ring has room for. RMSNorm gains by two (100 MB 0.9% on average), LayerNorm, an
// H100, 25 to 100 MB by 0.4%; float32 takes as long with two.
constexpr int kFirstSteps = sizeof(X) == 2 && sizeof(Dy) == 2 ? 2 : 1;

// Whether the ring keeps in shared memory where each place's next copy begins (Ring of staged.cuh), as gains where registers are
// few (LayerNorm, N=32768, 1 GB, 244.5 → 243.1 us). RMSNorm takes as long; without pace it loses.
constexpr bool kSourcesAhead = VECTOR && PACED && kLayerNorm && !kFillsBlock;

// The exchange of a row's sums, in a block or cluster, or in a gang.
struct NearExchange : SumExchange<kLayerNorm> {
    struct Asked {};
    __device__ NearExchange(BlockState& state, GangState&, const BlockShare& share, const BackwardArguments& a)
        : SumExchange<kLayerNorm>(state, share, a.group_threads) {}
    __device__ void send(int, int) const {}
    __device__ Asked ask(int) const { return {}; }
    __device__ void settle(int, Asked&) const {}
    __device__ Sums<Compute> collect(int j, const Sums<Compute>& posted, Asked) const {
        return SumExchange<kLayerNorm>::collect(j, posted);
    }
    __device__ void leave(unsigned, unsigned) const {}
};
struct FarExchange : GangExchange<kLayerNorm> {
    __device__ FarExchange(BlockState&, GangState& state, const BlockShare& share, const BackwardArguments& a)
        : GangExchange<kLayerNorm>(state, share, a.sums) {}
    __device__ Sums<float> collect(int j, const Sums<float>&, Asked asked) const {
        return GangExchange<kLayerNorm>::collect(j, asked);
    }
};
template <bool kFar> struct ExchangeOf { using Type = NearExchange; };
template <> struct ExchangeOf<true> { using Type = FarExchange; };
using Exchange = ExchangeOf<kGang>::Type;

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreadsAtOnce, 1)
    backward_staged(const BackwardArguments a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ BlockState state;
    __shared__ GangState gang_state;
    __shared__ PaceState pace_state;

    // Unsigned: a signed one is not divided by a shift.
    const unsigned row_blocks = kSumsColumns ? gridDim.x : gridDim.x - a.column_blocks;
    if constexpr (!kSumsColumns) {
        if (blockIdx.x >= row_blocks) {
            const ColumnArguments columns(a, blockIdx.x - row_blocks);
            sum_columns<kThreadsAtOnce>(columns, reinterpret_cast<Compute*>(shared));
            if (a.row_parts > 1) {
                add_parts(columns, reinterpret_cast<unsigned*>(a.meeting->counters) + columns.slice, a.row_parts);
            }
            return;
        }
    }

    const BlockColumns block(a, kGang ? row_blocks / unsigned(a.partial_rows) : kCluster);
    // The ring lies behind the column sums' second level; where walkers have none, behind w on its way. What shared memory leaves
    // is the L1 cache, through which column blocks read (LayerNorm, N=4864, 50 MB, 31.9 us beside 199 KB, 23.4 beside 136).
    const int ahead_bytes =
        kSumsColumns ? ColumnSums::shared_bytes(blockDim.x) : (a.slab_columns * int(sizeof(Compute)) + 127) / 128 * 128;
    const ColumnsAhead w_ahead(state, block, a.w, a.w_code, shared, ahead_bytes);
    const BlockShare share(a, block);
    const RowWalk walk(share, a.rows, a.steps, row_blocks / unsigned(share.blocks));
    const RingPart<X, true> x_part(a, share, a.x, a.x_row_stride, 0, a.read_once);
    const RingPart<Dy, true> dy_part(a, share, a.dy, a.dy_row_stride, x_part.part_bytes, a.read_once);
    char* const places = shared + ahead_bytes;
    const Ring<kSourcesAhead> ring(places, state, share, a.stages, x_part.part_bytes + dy_part.part_bytes, a.rows, walk);
    const int64 first_row = walk.first + share.group;
    StatisticsAhead statistics;
    statistics.lanes = lanes_of(a.group_threads);
    ring.start<kFirstSteps>(walk, x_part, dy_part);
    statistics.load_next(a, first_row, walk.step, 0);
    const Exchange exchange(state, gang_state, share, a);
    exchange.start(share.thread);
    const PaceOf<PACED> pace(a, a.meeting->counters, pace_state, walk, share);
    announce_barriers();
    if (kSumsColumns && a.meeting) a.meeting->start();
    wait_for_barriers();

    const Columns own(share.thread, a.group_threads, share.columns,
                      shift_of_row(a.x + first_row * a.x_row_stride));
    const PairsHeld held(own);
    Weights<> w;
    w_ahead.wait();
    w.load(w_ahead.source, a.w_code, own);
    ring.start_others<kFirstSteps>(walk, x_part, dy_part);
    // From here on the column sums' second level lies where w was copied to. And with pace, in clusters, what one warp wrote into
    // PaceState, and as Sources, is read by others, who have met it so far by a barrier alone that orders nothing else.
    if constexpr (kSumsColumns || (PACED && kClustered)) __syncthreads();

    X* const first_dx = a.dx + first_row * a.dx_row_stride + share.first_column;
    RowWriter writer(own, held, first_dx);
    X* dx = writer.begin(first_dx, own);
    const Compute reciprocal_columns = Compute(1) / Compute(a.columns);
    ColumnSums column_sums(shared, threadIdx.x, blockDim.x, own);
    const auto publish = [&](const Columns& at) {
        return publish_columns(a, column_sums, share.walker, share.first_column, at, a.group_threads);
    };
    const auto staged_row = [&](const RingPlace& place, int j) {
        const char* const at = ring.place(place.stage);
        return StagedRow{x_part.in(at, share, walk.row(j)), dy_part.in(at, share, walk.row(j)), share.team_column};
    };
    int own_count = walk.end - (walk.row(walk.end - 1) + share.group >= a.rows);
    asm volatile("" : "+r"(own_count));  // found here, once
    struct Step {
        RowStatistics row;
        Sums<Compute> posted;
        RingPlace place;
        bool active;  // a team may have no columns, the last step no row for a group
    } now, waiting[kBehind];
    Step& before = waiting[0];
    // The second half of step j, which is `before`.
    const auto write_dx = [&](int j, const Columns& at, Exchange::Asked asked) {
        const RowCoefficients coefficients(exchange.collect(j, before.posted, asked), reciprocal_columns, before.row);
        if ((!kSumsColumns || a.dx) && (RowWriter::kCrosses || before.active)) {
            staged_row(before.place, j).for_each_vector(at, [&](int k, const XVector& x, const DyVector& dy, bool holds) {
                const XVector packed = second_half(k, x, dy, w, before.row, coefficients);
                writer.put<true>(dx, at, k, packed, before.active, holds);
            });
            writer.finish(dx, at, before.active);
        }
        dx += walk.step * a.dx_row_stride;
    };
    Attendance attendance;
    // The first half of step j, then the second half of the step kBehind before it; with kHoldsBack, those of step held_from and
    // later come behind the loop.
    int held_from = kHoldsBack && a.meeting ? walk.end - 2 : walk.end - 1;
    // Found here, once: in clusters the compiler found it anew for each step (LayerNorm, N=32768, 1 GB, 248.8 → 244.5 us).
    if constexpr (kHoldsBack) asm volatile("" : "+r"(held_from));
    for (int j = 0; j < (kHoldsBack ? walk.end : walk.end + kBehind); ++j) {
        const Columns at = own.found_anew();
        Exchange::Asked asked = exchange.ask(j - kBehind);  // of no use in the first steps
        if (kHoldsBack || j < walk.end) {
            now.row = statistics.of(a, first_row, walk.step, j);
            now.active = ring.wait(now.place) && j < own_count;
            Sums<Compute> chains[kChains] = {};
            if (now.active) {
                staged_row(now.place, j).for_each_vector(at, [&](int k, XVector x, DyVector dy, bool holds) {
                    keep_held(x, held.of(k, holds));
                    keep_held(dy, held.of(k, holds));
                    first_half<true, kSumsColumns>(chains, &column_sums, k, x, dy, w, now.row);
                });
            }
            const Sums<Compute> partial = sum_chains<kLayerNorm>(chains, at);
            if constexpr (kGang) exchange.settle(j - kBehind, asked);
            now.posted = exchange.post(partial, j, share.thread);
        } else if constexpr (kSumsColumns && kPublishesInLoop) {
            if (!kGang || j == walk.end) attendance = publish(at);
        }
        const bool writes = j >= kBehind && (!kHoldsBack || j <= held_from);
        if (writes) write_dx(j - kBehind, at, asked);
        if constexpr (kGang) exchange.send(j, walk.end);
        if (writes) ring.fill_again(before.place, walk, j - kBehind, pace, x_part, dy_part);
        if (kSumsColumns && (kHoldsBack || j < walk.end)) {
            column_sums.row_done(a.group_threads, j + 1 == walk.end);
        }
        if (!kHoldsBack || j <= held_from || j == 0) {  // a walk of one step holds it back
#pragma unroll
            for (int i = 0; i + 1 < kBehind; ++i) waiting[i] = waiting[i + 1];
            waiting[kBehind - 1] = now;
        }
        now.place.advance(a.stages);
    }
    if constexpr (kSumsColumns && !kPublishesInLoop) attendance = publish(own);
    if constexpr (kHoldsBack) {
#pragma unroll 1
        for (int j = held_from < 0 ? 0 : held_from; j < walk.end; ++j) {  // no place is filled again any more
            write_dx(j, own.found_anew(), {});
            pace.step_done(j, walk.end);
            before.row = now.row;
            before.posted = now.posted;
            before.active = now.active;
            before.place.advance(a.stages);
        }
    }
    if constexpr (kSumsColumns) {
        constexpr int kBatch = kThreadsAtOnce == 256 ? kReductionBatch : 8;
        reduce_partials<kBatch, 0, Compute>(a, attendance, shared, share.first_column, share.columns);
    }
    pace.finish();
    exchange.leave(row_blocks, a.steps + 1);
    leave_together();
}
