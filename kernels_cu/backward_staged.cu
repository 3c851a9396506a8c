// Backward pass for rows that fit in shared memory, of one block or of the blocks of a cluster (compute capability 9.0).
//
// A row is split by columns over the CLUSTER blocks of a cluster, `slab_columns` each, 32 columns a thread (half
// that in float64, and with VECTOR = 0). Where CLUSTER is 1, a block may hold several groups of `group_threads` threads (several warps each), every
// group with rows of its own. A group keeps `stages` rows in flight: bulk copies bring x and dy into its ring in shared
// memory, from where they are read twice, for the row's sums and for dx.
//
// The sums of row j + 1 are posted before those of row j are awaited, so the exchange between warps, and between
// blocks by remote stores that complete on the receiver's barrier, hides behind work. The exchange tells more: when every
// warp has posted row j + 1, every warp is done with row j − 1, and that row's place in the ring is filled again. No
// other barrier is needed.
//
// In registers: this thread's w, dw and db. In shared memory: the rings, the second level of dw and db, four slots of
// sums per group. To memory: x, dy and dx once; one partial row of dw and db for each cluster. Orders of sums: a row
// over a thread's columns, over its lanes by a butterfly, over its warps and blocks likewise; a column over 16
// rows, over these in turn, over the block's groups.
//
// With VECTOR = 0 rows may start anywhere: the copy takes the 16-byte words that cover the row, at most 15 bytes more
// on either side, all in words that hold at least one byte of the row.
#include "backward.cuh"
#include "overlap.cuh"
#include "pipeline.cuh"

constexpr int kMaxThreads = sizeof(Compute) == 8 ? 256 : 8192 / kColumnsPerThread;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kCluster = CLUSTER;  // known when compiled: at N=65536 RMSNorm took 118 us so, 135 us as an argument
constexpr bool kClustered = kCluster > 1;
constexpr int kMaxGroups = kClustered ? 1 : kMaxWarps;
constexpr int kMaxStages = 8;
constexpr int kSlots = 4;  // a row's sums stay readable until every warp has posted the row after next

struct Barriers {
    Barrier full[kMaxGroups][kMaxStages];
    Barrier summed[kMaxGroups][kSlots];
};

// The rows of one group: first, first + step, …
struct RowWalk {
    int64 first, step;
    int count;

    __device__ RowWalk(int64 rows, int group, int groups) {
        first = int64(blockIdx.x / kCluster) * groups + group;
        step = int64(gridDim.x / kCluster) * groups;
        count = first < rows ? int((rows - first + step - 1) / step) : 0;
    }
    __device__ int64 row(int j) const { return first + j * step; }
};

// Where a row's part lies in memory: the aligned words to copy, and the part's first byte in them.
struct Window {
    const char* start;
    int bytes, offset;

    template <class T> __device__ Window(const T* part, int columns) {
        offset = kVector > 1 ? 0 : int(reinterpret_cast<unsigned long long>(part) % 16);
        start = reinterpret_cast<const char*>(part) - offset;
        bytes = (offset + columns * int(sizeof(T)) + 15) / 16 * 16;
    }
};

// A group's rows in flight: for each stage a part of x and a part of dy.
struct Ring {
    char* base;
    Barrier* full;
    int x_bytes, stage_bytes, first_column, columns;

    __device__ static int part_bytes(int columns, int element_bytes) {
        return (columns * element_bytes + (kVector > 1 ? 0 : 32) + 127) / 128 * 128;
    }

    __device__ Ring(char* shared, Barrier* full, const BackwardArguments& a, int group, int first_column, int columns)
        : full(full), first_column(first_column), columns(columns) {
        x_bytes = part_bytes(a.slab_columns, sizeof(X));
        stage_bytes = x_bytes + part_bytes(a.slab_columns, sizeof(Dy));
        base = shared + group * a.stages * stage_bytes;
    }

    __device__ void fill(const BackwardArguments& a, int stage, int64 row) const {
        const Window x(a.x + row * a.x_row_stride + first_column, columns);
        const Window dy(a.dy + row * a.dy_row_stride + first_column, columns);
        const SharedAddress target = shared_address(base + stage * stage_bytes);
        full[stage].arrive_expecting(x.bytes + dy.bytes);
        bulk_copy(target, x.start, x.bytes, full[stage]);
        bulk_copy(target + x_bytes, dy.start, dy.bytes, full[stage]);
    }

    __device__ void load(const BackwardArguments& a, int stage, int64 row, int column, Packed<X, kVector>& x,
                         Packed<Dy, kVector>& dy) const {
        const char* part = base + stage * stage_bytes;
        const Window x_window(a.x + row * a.x_row_stride + first_column, columns);
        const Window dy_window(a.dy + row * a.dy_row_stride + first_column, columns);
        x.load(reinterpret_cast<const X*>(part + x_window.offset) + column);
        dy.load(reinterpret_cast<const Dy*>(part + x_bytes + dy_window.offset) + column);
    }
};

// A place in the ring, and the parity of the phase that its barrier is in on this lap.
struct RingPlace {
    int stage, parity;

    __device__ void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ int stage_before(int stages) const { return (stage ? stage : stages) - 1; }
};

// A group's exchange of row sums. Row number j of the group uses slot j % kSlots.
struct SumExchange {
    Barrier* summed;
    Sums<Compute>* slots;
    int warps, entries, rank;  // warps of this group in this block; entries of a slot

    __device__ SumExchange(Barrier* summed, Sums<Compute>* sums, int group, int group_threads, int rank)
        : summed(summed), warps(group_threads / 32), entries(warps * kCluster), rank(rank) {
        slots = sums + group * kSlots * entries;
    }

    __device__ void init(int thread) const {
        if (thread < kSlots) summed[thread].init(kClustered ? 1 : warps);
    }

    // Returns the warp's sums, for a group of a single warp.
    __device__ Sums<Compute> post(Sums<Compute> sums, int j, int thread) const {
        const int slot = j % kSlots, warp = thread / 32, lane = thread % 32;
        sum_over_lanes<kLayerNorm, 32>(sums);
        __syncwarp();  // the warp's reads of earlier rows come before its arrival
        if (entries == 1) return sums;
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

    __device__ void wait(int j) const {
        if (entries > 1) summed[j % kSlots].wait(j / kSlots & 1);
    }

    __device__ Sums<Compute> collect(int j, const Sums<Compute>& posted) const {
        if (entries == 1) return posted;
        wait(j);
        const int slot = j % kSlots;
        return sum_entries<kLayerNorm, kMaxWarps * kCluster>(slots + slot * entries, entries);
    }
};

__device__ inline void barrier_over_row_sharers() {
    if constexpr (kClustered) cluster_barrier();
    else __syncthreads();
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kMaxThreads, 1)
    backward_staged(const BackwardArguments a) {
    extern __shared__ __align__(128) uint4 shared[];
    __shared__ Barriers barriers;
    __shared__ Sums<Compute> sums[kSlots * kMaxWarps * kCluster];

    const int groups = blockDim.x / a.group_threads;
    const int group = threadIdx.x / a.group_threads, thread = threadIdx.x % a.group_threads;
    const int rank = kClustered ? cluster_rank() : 0;
    const int first_column = rank * a.slab_columns;
    const int columns = minimum(a.slab_columns, a.columns - first_column);

    const RowWalk walk(a.rows, group, groups);
    const Ring ring(reinterpret_cast<char*>(shared) + ColumnSums::shared_bytes(blockDim.x), barriers.full[group], a, group,
                    first_column, columns);
    const SumExchange exchange(barriers.summed[group], sums, group, a.group_threads, rank);
    exchange.init(thread);
    if (thread < a.stages) ring.full[thread].init(1);
    fence_barrier_init();
    __syncwarp();
    barrier_over_row_sharers();
    if (thread == 0) {
        for (int j = 0; j < minimum(a.stages, walk.count); ++j) ring.fill(a, j, walk.row(j));
    }

    const Columns own(thread, a.group_threads, columns);
    ColumnSums column_sums(shared, blockDim.x);
    let_next_kernel_launch();
    Weights w;
    load_weights(w, a, own, first_column);

    const auto post_sums = [&](int j, RingPlace place, const RowStatistics& statistics) {
        ring.full[place.stage].wait(place.parity);
        Sums<Compute> partial = {Compute(0), Compute(0)};
        const Columns at = own.found_anew();
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            Packed<X, kVector> x;
            Packed<Dy, kVector> dy;
            ring.load(a, place.stage, walk.row(j), at.readable(k), x, dy);
            add_to_sums(partial, x, dy, w[k], statistics);
        }
        return exchange.post(partial, j, thread);
    };

    const Compute reciprocal_columns = Compute(1) / Compute(a.columns);
    RowStatistics current, next, after_next;
    Sums<Compute> posted, posted_next;
    RingPlace place = {0, 0}, next_place = place;
    if (walk.count > 0) {
        current.load(a, walk.row(0));
        posted = post_sums(0, place, current);
    }
    if (walk.count > 1) next.load(a, walk.row(1));
    for (int j = 0; j < walk.count; ++j) {
        next_place.advance(a.stages);
        if (j + 2 < walk.count) after_next.load(a, walk.row(j + 2));
        if (j + 1 < walk.count) posted_next = post_sums(j + 1, next_place, next);
        const RowCoefficients coefficients(exchange.collect(j, posted), reciprocal_columns, current.rstd);
        const int64 row = walk.row(j);
        X* const dx = a.dx + row * a.dx_row_stride + first_column;
        const Columns at = own.found_anew();
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            Packed<X, kVector> x;
            Packed<Dy, kVector> dy;
            ring.load(a, place.stage, row, at.readable(k), x, dy);
            finish_vector(column_sums, k, x, dy, w[k], current, coefficients, a.dx && at.holds(k), dx + at.at(k));
        }
        column_sums.row_done();
        if (thread == 0 && j >= 1 && j - 1 + a.stages < walk.count) {
            exchange.wait(j + 1);
            ring.fill(a, place.stage_before(a.stages), walk.row(j - 1 + a.stages));
        }
        place = next_place;
        current = next;
        next = after_next;
        posted = posted_next;
    }
    column_sums.flush();

    // Also: no block leaves while another may still store into its shared memory.
    barrier_over_row_sharers();
    if (a.dw_partials || a.db_partials) {
        column_sums.write_partials(a, blockIdx.x / kCluster, first_column, own, a.group_threads);
    }
}
