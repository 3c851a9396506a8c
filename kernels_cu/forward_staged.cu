// Forward pass for rows that the blocks of a cluster hold in registers (compute capability 9.0): y, mean and rstd.
//
// How rows are split, staged and walked: staged.cuh. A thread takes its columns of a row from the ring into registers,
// whereupon the ring's place is filled again. Row j + 1 is taken and its sums posted before those of row j are awaited, so
// their exchange between warps and blocks hides behind work.
//
// One exchange is enough for LayerNorm, too: a warp finds its own mean, and the squares of the distances from that. With n
// columns, mean m and squares q in each warp, the row's squares are Σ q + n·(m − mean)² (Chan, Golub and LeVeque, 1979), as
// exact as centring all columns. Orders of sums: over a thread's columns, over its lanes by a butterfly, over the warps and
// blocks likewise.
#include "forward.cuh"

constexpr int kMaxThreads = sizeof(Compute) == 8 ? 256 : 512;

#include "staged.cuh"

// A thread's x between its two uses: vectors as they came, single columns widened, whichever takes less registers.
template <bool kWhole> struct KeptVector {
    Vector packed;
    __device__ void keep(const Vector& as_it_came, const Compute (&)[kVector]) { packed = as_it_came; }
    __device__ void unpack(Compute (&x)[kVector]) const { packed.unpack(x); }
};
template <> struct KeptVector<false> {
    Compute value;
    __device__ void keep(const Vector&, const Compute (&x)[kVector]) { value = x[0]; }
    __device__ void unpack(Compute (&x)[kVector]) const { x[0] = value; }
};

struct RowStatistics {
    Compute mean, rstd;
};

// From a row's columns to its statistics. What warps post is, of their columns, the squares of the distances from their
// mean, and that mean (RMSNorm: from 0, and 0).
struct RowMoments {
    static constexpr int kMost = kMaxWarps * kCluster, kLanes = minimum(kMost, 32);

    const SumExchange<false>& exchange;
    const Compute* entry_columns;  // held by the warps that post the entries of a sum
    const double eps;
    Compute reciprocal_columns, reciprocal_warp_columns;

    __device__ RowMoments(const ForwardArguments& a, const Columns& own, const SumExchange<false>& exchange,
                          const Compute* entry_columns)
        : exchange(exchange), entry_columns(entry_columns), eps(a.eps),
          reciprocal_columns(Compute(1) / Compute(a.columns)) {
        const int span = exchange.lanes * kColumnsPerThread;  // of the group's lanes in a warp
        const int columns = held(own.count - own.first / span * span, span);
        reciprocal_warp_columns = columns ? Compute(1) / Compute(columns) : Compute(0);
    }

    // By all threads of a block, before they first meet.
    __device__ static void find_entry_columns(Compute (&entry_columns)[kMost], const ForwardArguments& a) {
        const int span = 32 * kColumnsPerThread, warps = (a.group_threads + 31) / 32;
        for (int entry = threadIdx.x; entry < kMost; entry += blockDim.x) {
            const int block = entry / warps, warp = entry % warps;
            const int slab = minimum(a.slab_columns, a.columns - block * a.slab_columns);
            entry_columns[entry] = Compute(held(slab - warp * span, span));
        }
    }

    __device__ Sums<Compute> of_warp(const Compute (&x)[kVectors][kVector], const Columns& at) const {
        Sums<Compute> sum = {Compute(0), Compute(0)}, squares = sum;
        Compute mean = Compute(0);
        if constexpr (kLayerNorm) {
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
#pragma unroll
                for (int v = 0; v < kVector; ++v) sum.first += x[k][v];
            }
            exchange.sum_in_warp(sum);
            mean = sum.first * reciprocal_warp_columns;
        }
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
#pragma unroll
            for (int v = 0; v < kVector; ++v) {
                const Compute distance = !kLayerNorm ? x[k][v] : at.holds(k) ? x[k][v] - mean : Compute(0);
                squares.first += distance * distance;
            }
        }
        exchange.sum_in_warp(squares);
        return {squares.first, mean};
    }

    __device__ RowStatistics of_row(int j, const Sums<Compute>& posted) const {
        Compute mean = posted.second, squares = posted.first;
        if (exchange.entries > 1) {
            const Sums<Compute>* const entries = exchange.wait(j);
            Sums<Compute> sum = {Compute(0), Compute(0)};
            if constexpr (kLayerNorm) {
#pragma unroll
                for (int i = 0; i < kMost; i += kLanes) {
                    const int entry = i + threadIdx.x % kLanes;
                    if (entry < exchange.entries) sum.first += entry_columns[entry] * entries[entry].second;
                }
                sum_over_lanes<false, kLanes>(sum);
                mean = sum.first * reciprocal_columns;
                sum.first = Compute(0);
            }
#pragma unroll
            for (int i = 0; i < kMost; i += kLanes) {
                const int entry = i + threadIdx.x % kLanes;
                if (entry < exchange.entries) {
                    const Sums<Compute> posted = entries[entry];
                    sum.first += posted.first;
                    if constexpr (kLayerNorm) {
                        sum.first += entry_columns[entry] * (posted.second - mean) * (posted.second - mean);
                    }
                }
            }
            sum_over_lanes<false, kLanes>(sum);
            squares = sum.first;
        }
        return {mean, reciprocal_root(squares * reciprocal_columns, eps)};
    }

private:
    __device__ static int held(int left, int span) { return left < 0 ? 0 : minimum(left, span); }
};

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kMaxThreads, 1)
    forward_staged(const ForwardArguments a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ BlockState state;

    const int groups = blockDim.x / a.group_threads;
    const int group = threadIdx.x / a.group_threads, thread = threadIdx.x % a.group_threads;
    const int rank = kClustered ? cluster_rank() : 0;
    const int first_column = rank * a.slab_columns;
    const int columns = minimum(a.slab_columns, a.columns - first_column);

    const RowWalk walk(a.rows, groups);
    const RingPart<X> x_part = {a.x + first_column, a.x_row_stride, 0};
    const Ring ring = {shared, &state, a.stages, RingPart<X>::bytes(groups * a.slab_columns), columns, groups, a.rows};
    const SumExchange<false> exchange(state, group, a.group_threads, rank);
    __shared__ Compute entry_columns[RowMoments::kMost];
    if constexpr (kLayerNorm) RowMoments::find_entry_columns(entry_columns, a);
    if (thread == 0) exchange.init();
    if (threadIdx.x == 0) ring.init();
    if (thread == 0) fence_barrier_init();
    barriers_start();

    const Columns own(thread, a.group_threads, columns);  // w and b before the rows, as in the backward pass
    Compute w[kVectors][kVector], b[kVectors][kVector];
    const auto own_column = [&](int k) { return own.holds(k) ? first_column + own.at(k) : -1; };
    fill_columns(w, Compute(1));
    fill_columns(b, Compute(0));
    load_columns(w, a.w, a.w_code, own_column);
    load_columns(b, a.b, a.b_code, own_column);
    if (threadIdx.x == 0) ring.fill_first(walk, x_part);
    barriers_ready();

    const int64 first_row = walk.first + group;
    X* y = a.y + first_row * a.y_row_stride + first_column;
    const RowMoments moments(a, own, exchange, entry_columns);
    RingPlace place;
    KeptVector<(kVector > 1)> kept[kVectors], kept_before[kVectors];
    Sums<Compute> posted, posted_before;
    // The sums of step j, then y of the step before it.
    for (int j = 0; j <= walk.count; ++j) {
        const Columns at = own.found_anew();
        if (j < walk.count) {
            ring.wait(place);
            const X* const x_row = x_part.in(ring.place(place.stage), walk.row(j), group * columns);
            Compute x[kVectors][kVector];
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                Vector packed;
                packed.load(x_row + at.readable(k));
                packed.unpack(x[k]);
#pragma unroll
                for (int v = 0; v < kVector; ++v) x[k][v] = at.holds(k) ? x[k][v] : Compute(0);
                kept[k].keep(packed, x[k]);
            }
            ring.fill_again(place.stage, walk, j, x_part);
            place.advance(a.stages);
            posted = moments.of_warp(x, at);
            exchange.post_warp(posted, j, thread);
        }
        if (j > 0) {
            const int64 row = first_row + (j - 1) * walk.step;
            const bool active = row < a.rows;  // the last step may have more groups than rows
            const RowStatistics statistics = moments.of_row(j - 1, posted_before);
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                Compute x[kVector];
                kept_before[k].unpack(x);
#pragma unroll
                for (int v = 0; v < kVector; ++v) {
                    const Compute centred = kLayerNorm ? x[v] - statistics.mean : x[v];
                    x[v] = centred * statistics.rstd * w[k][v] + b[k][v];
                }
                Vector packed;
                packed.pack(x);
                if (active && at.holds(k)) packed.store_streaming(y + at.at(k));
            }
            y += walk.step * a.y_row_stride;
            if (active && thread == 0 && rank == 0) {
                a.rstd[row] = statistics.rstd;
                if constexpr (kLayerNorm) a.mean[row] = statistics.mean;
            }
        }
        posted_before = posted;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) kept_before[k] = kept[k];
    }
    leave_together();
}
