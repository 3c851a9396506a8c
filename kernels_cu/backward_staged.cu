// Backward pass for rows that fit in shared memory, of one block or of the blocks of a cluster (compute capability 9.0).
//
// A row is split by columns over the CLUSTER blocks of a cluster, `slab_columns` each, COLUMNS_PER_THREAD a thread. Where
// CLUSTER is 1, a block may hold several groups of `group_threads` threads (lanes of a warp, or several warps), each with a
// row of its own; the rows of a block then lie one after the other in memory. A block keeps `stages` steps, of a row for
// each group, in flight: bulk copies bring x and dy into its ring in shared memory, from where they are read twice, for the
// rows' sums and for dx. The last warp that is done with a step fills its place again.
//
// The first half of step j + 1 comes before the second half of step j, so the exchange of a row's sums, between warps
// and by remote stores between blocks, hides behind work.
//
// In registers: this thread's w, dw and db. In shared memory: the ring, the second level of dw and db, four slots of
// sums per group. To memory: x, dy and dx once; one partial row of dw and db for each block or cluster. Orders of sums: a
// row over a thread's columns, over its lanes by a butterfly, over its warps and blocks likewise; a column over 16
// rows, over these in turn, over the block's groups.
//
// With VECTOR = 0 rows may start anywhere: the copy takes the 16-byte words that cover the rows, at most 15 bytes more
// on either side, all in words that hold at least one byte of a row.
#include "backward.cuh"
#include "overlap.cuh"
#include "pipeline.cuh"

constexpr int kMaxThreads = kVector > 1 || sizeof(Compute) == 8 ? 256 : 512;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kCluster = CLUSTER;  // known when compiled: at N=65536 RMSNorm took 118 us so, 135 us as an argument
constexpr bool kClustered = kCluster > 1;
constexpr int kMaxStages = 8;
constexpr int kSlots = 4;  // a warp that posts row j knows that all others have read the sums of row j − 4

struct BlockState {
    Barrier full[kMaxStages];            // the rows of a step have arrived in their place
    Barrier done[kMaxStages];            // all warps are done with them
    Barrier summed[kMaxWarps][kSlots];   // every warp of a group, in every block of the cluster, has posted a row's sums
    Sums<Compute> sums[kMaxWarps][kSlots * kCluster];
};

// The steps of one block: `groups` consecutive rows from row(0) on, from row(1) on, …
struct RowWalk {
    int64 first, step;
    int count;

    __device__ RowWalk(int64 rows, int groups) {
        first = int64(blockIdx.x / kCluster) * groups;
        step = int64(gridDim.x / kCluster) * groups;
        count = first < rows ? int((rows - first + step - 1) / step) : 0;
    }
    __device__ int64 row(int j) const { return first + j * step; }
};

// A place in the ring, and the parity of the phase that its barrier is in on this lap.
struct RingPlace {
    int stage = 0, parity = 0;

    __device__ void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Where rows lie in shared memory: at the bytes at which they lie in the 16-byte words that cover them.
template <class T> __device__ int offset_in_words(const T* part) {
    return kVector > 1 ? 0 : int(reinterpret_cast<unsigned long long>(part) % 16);
}

// The steps in flight: for each stage a part of x and a part of dy.
struct Ring {
    char* base;
    BlockState* state;
    int x_bytes, stage_bytes, first_column, columns, groups;

    __device__ static int part_bytes(int elements, int element_bytes) {
        return (elements * element_bytes + (kVector > 1 ? 0 : 32) + 127) / 128 * 128;
    }

    __device__ Ring(char* shared, BlockState* state, const BackwardArguments& a, int first_column, int columns, int groups)
        : base(shared), state(state), first_column(first_column), columns(columns), groups(groups) {
        x_bytes = part_bytes(groups * a.slab_columns, sizeof(X));
        stage_bytes = x_bytes + part_bytes(groups * a.slab_columns, sizeof(Dy));
    }
    __device__ char* x(int stage) const { return base + stage * stage_bytes; }
    __device__ char* dy(int stage) const { return x(stage) + x_bytes; }

    __device__ void init(const BackwardArguments& a) const {
        for (int stage = 0; stage < a.stages; ++stage) {
            state->full[stage].init(1);
            state->done[stage].init(blockDim.x / 32);
        }
    }

    __device__ void fill(const BackwardArguments& a, int stage, int64 row) const {
        const int elements = (a.rows - row < groups ? int(a.rows - row) : groups) * columns;
        const X* const from_x = a.x + row * a.x_row_stride + first_column;
        const Dy* const from_dy = a.dy + row * a.dy_row_stride + first_column;
        const int x_offset = offset_in_words(from_x), dy_offset = offset_in_words(from_dy);
        const int x_size = (x_offset + elements * int(sizeof(X)) + 15) / 16 * 16;
        const int dy_size = (dy_offset + elements * int(sizeof(Dy)) + 15) / 16 * 16;
        Barrier& full = state->full[stage];
        full.arrive_expecting(x_size + dy_size);
        bulk_copy(shared_address(x(stage)), reinterpret_cast<const char*>(from_x) - x_offset, x_size, full);
        bulk_copy(shared_address(dy(stage)), reinterpret_cast<const char*>(from_dy) - dy_offset, dy_size, full);
    }
};

// Where one group's row lies, of each step: the place's start, and then as many bytes on. With VECTOR = 0 the low bits of the
// row's address tell, which change from step to step.
template <class T> struct GroupPart {
    unsigned first, step;  // low bits of the address of the block's row
    int bytes;             // from the block's first row of a step to the group's

    __device__ GroupPart(const T* first_part, int64 step_elements, int elements)
        : first(unsigned(reinterpret_cast<unsigned long long>(first_part))), step(unsigned(step_elements * sizeof(T))),
          bytes(elements * int(sizeof(T))) {}
    __device__ const T* of(const char* place, int j) const {
        return reinterpret_cast<const T*>(place + bytes + (kVector > 1 ? 0 : (first + j * step) % 16));
    }
};

// The statistics of a group's rows, as many steps ahead as the group has lanes in a warp: lane i loads those of the
// batch's row i.
struct StatisticsAhead {
    RowStatistics batch, next;
    int lanes;

    __device__ void load_next(const BackwardArguments& a, int64 first_row, int64 step, int j) {
        const int64 row = first_row + (j + (int(threadIdx.x) & (lanes - 1))) * step;
        if (row < a.rows) next.load(a, row);
    }
    // To be called for each step in turn.
    __device__ RowStatistics of(const BackwardArguments& a, int64 first_row, int64 step, int j) {
        const int lane = j & (lanes - 1);
        if (lane == 0) {
            batch = next;
            load_next(a, first_row, step, j + lanes);
        }
        RowStatistics row;
        row.rstd = __shfl_sync(0xffffffffu, batch.rstd, lane, lanes);
        if constexpr (kLayerNorm) row.mean = __shfl_sync(0xffffffffu, batch.mean, lane, lanes);
        return row;
    }
};

// A group's exchange of row sums. Step j uses slot j % kSlots.
struct SumExchange {
    Barrier* summed;
    Sums<Compute>* slots;
    int lanes, warps, entries, rank;  // of this group: lanes in a warp, warps in this block, entries of a slot

    __device__ SumExchange(BlockState& state, int group, int group_threads, int rank)
        : summed(state.summed[group * group_threads / 32]), slots(state.sums[group * group_threads / 32]),
          lanes(minimum(group_threads, 32)), warps((group_threads + 31) / 32), entries(warps * kCluster), rank(rank) {}

    __device__ void init() const {
        if (entries == 1) return;
        for (int slot = 0; slot < kSlots; ++slot) summed[slot].init(kClustered ? 1 : warps);
    }

    // Returns the warp's sums, for a group that needs no more.
    __device__ Sums<Compute> post(Sums<Compute> sums, int j, int thread) const {
        if (lanes == 32) sum_over_lanes<kLayerNorm, 32>(sums);
        else sum_over_lanes<kLayerNorm>(sums, lanes);
        if (entries == 1) return sums;
        const int slot = j % kSlots, warp = thread / 32, lane = thread % 32;
        Sums<Compute>* entry = slots + slot * entries + rank * warps + warp;
        if constexpr (kClustered) {
            if (thread == 0) summed[slot].arrive_expecting(entries * int(sizeof(Sums<Compute>)));
            if (lane < kCluster) {
                store_remote(address_in_block(shared_address(entry), lane),
                             address_in_block(summed[slot].address(), lane), sums.first, sums.second);
            }
        } else if (lane == 0) {
            *entry = sums;
            summed[slot].arrive();
        }
        return sums;
    }

    __device__ Sums<Compute> collect(int j, const Sums<Compute>& posted) const {
        if (entries == 1) return posted;
        const int slot = j % kSlots;
        summed[slot].wait(j / kSlots & 1);
        return sum_entries<kLayerNorm, kMaxWarps * kCluster>(slots + slot * entries, entries);
    }
};

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kMaxThreads, 1)
    backward_staged(const BackwardArguments a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ BlockState state;

    const int groups = blockDim.x / a.group_threads;
    const int group = threadIdx.x / a.group_threads, thread = threadIdx.x % a.group_threads;
    const int rank = kClustered ? cluster_rank() : 0;
    const int first_column = rank * a.slab_columns;
    const int columns = minimum(a.slab_columns, a.columns - first_column);
    let_next_kernel_launch();

    const RowWalk walk(a.rows, groups);
    const Ring ring(shared + ColumnSums::shared_bytes(blockDim.x), &state, a, first_column, columns, groups);
    const SumExchange exchange(state, group, a.group_threads, rank);
    if (thread == 0) exchange.init();
    if (threadIdx.x == 0) ring.init(a);
    if (thread == 0) fence_barrier_init();
    if constexpr (kClustered) cluster_arrive();

    // w before the rows, so that it does not wait behind them: at 25 MB it then came 5 us later.
    const int64 first_row = walk.first + group;
    StatisticsAhead statistics;
    statistics.lanes = minimum(a.group_threads, 32);
    statistics.load_next(a, first_row, walk.step, 0);
    const Columns own(thread, a.group_threads, columns);
    Weights w;
    load_weights(w, a, own, first_column);
    if (threadIdx.x == 0) {
        for (int j = 0; j < minimum(a.stages, walk.count); ++j) ring.fill(a, j, walk.row(j));
    }
    if constexpr (kClustered) cluster_wait();
    else __syncthreads();

    const GroupPart<X> x_part(a.x + walk.first * a.x_row_stride + first_column, walk.step * a.x_row_stride, group * columns);
    const GroupPart<Dy> dy_part(a.dy + walk.first * a.dy_row_stride + first_column, walk.step * a.dy_row_stride,
                                group * columns);
    X* dx = a.dx + first_row * a.dx_row_stride + first_column;
    const Compute reciprocal_columns = Compute(1) / Compute(a.columns);
    ColumnSums column_sums(shared, threadIdx.x, blockDim.x);
    RowStatistics row, row_before;
    Sums<Compute> posted, posted_before;
    RingPlace place, place_before;
    bool active, active_before;  // the last step may have more groups than rows
    // The first half of step j, then the second half of the step before it.
    for (int j = 0; j <= walk.count; ++j) {
        const Columns at = own.found_anew();
        if (j < walk.count) {
            active = groups == 1 || first_row + j * walk.step < a.rows;
            row = statistics.of(a, first_row, walk.step, j);
            state.full[place.stage].wait(place.parity);
            const X* const x_row = x_part.of(ring.x(place.stage), j);
            const Dy* const dy_row = dy_part.of(ring.dy(place.stage), j);
            Sums<Compute> partial = {Compute(0), Compute(0)};
            if (active) {
#pragma unroll
                for (int k = 0; k < kVectors; ++k) {
                    Packed<X, kVector> x;
                    Packed<Dy, kVector> dy;
                    x.load(x_row + at.readable(k));
                    dy.load(dy_row + at.readable(k));
                    first_half<true, true>(partial, &column_sums, k, x, dy, w[k], row);
                }
            }
            posted = exchange.post(partial, j, thread);
        }
        if (j > 0) {
            const RowCoefficients coefficients(exchange.collect(j - 1, posted_before), reciprocal_columns, row_before);
            const X* const x_row = x_part.of(ring.x(place_before.stage), j - 1);
            const Dy* const dy_row = dy_part.of(ring.dy(place_before.stage), j - 1);
            if (a.dx) {
#pragma unroll
                for (int k = 0; k < kVectors; ++k) {
                    Packed<X, kVector> x;
                    Packed<Dy, kVector> dy;
                    x.load(x_row + at.readable(k));
                    dy.load(dy_row + at.readable(k));
                    second_half(dx + at.at(k), active_before && at.holds(k), x, dy, w[k], row_before, coefficients);
                }
            }
            dx += walk.step * a.dx_row_stride;
            __syncwarp();
            if (threadIdx.x % 32 == 0 && j - 1 + a.stages < walk.count && state.done[place_before.stage].arrive_last()) {
                ring.fill(a, place_before.stage, walk.row(j - 1 + a.stages));
            }
        }
        if (j + 1 < walk.count) column_sums.row_done();
        row_before = row;
        posted_before = posted;
        place_before = place;
        active_before = active;
        place.advance(a.stages);
    }

    if (a.dw_partials || a.db_partials) {
        column_sums.write_partials(a, blockIdx.x / kCluster, first_column, own, a.group_threads);
    }
    if constexpr (kClustered) {  // no block leaves while another may still store into its shared memory
        cluster_arrive();
        cluster_wait();
    }
}
