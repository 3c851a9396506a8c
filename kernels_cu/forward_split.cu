// Forward pass for rows of any length, in two sweeps over memory: what each part of a row comes to, then y.
//
// The route for rows that no cluster holds, and for long rows where there are no clusters. A row is split by columns over the
// slabs of blockIdx.x, 16 columns a thread (in float64 8); blockIdx.y walks rows. The first kernel writes a pair of
// sums per row and slab; in every block of the second one warp puts a row's pairs together (as forward.cuh says), and all do the
// rest of its slab. x crosses memory twice, y once. Orders of sums: a slab over a thread's columns, over lanes and warps by
// butterflies, the slabs of a row over a lane's in turn, then by a butterfly.
#include "forward.cuh"
#include "slab.cuh"

constexpr int kThreads = 256;

// Of each slab of a row Σ(x − m)², m its own mean, and Σx, both counted from the row's origin; RMSNorm: Σx², and 0.
__device__ inline Sums<Compute>* slab_sums(const ForwardArguments& a, int64 row) {
    return static_cast<Sums<Compute>*>(a.sums) + row * gridDim.x;
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) forward_split_sums(const ForwardArguments a) {
    __shared__ GroupSum<Compute, kThreads / 32> group_sum;
    const Slab slab(a);
    const Columns own(threadIdx.x, kThreads, slab.columns);
    const ThreadPart part([&](int k) { return own.holds(k); });
    const Compute reciprocal_columns = Compute(1) / Compute(slab.columns);

    // The next row is on its way while one is at work. Columns that the thread does not hold stay 0.
    Vector next[kVectors] = {};
    Origin next_origin = {};
    const auto load = [&](int64 row) {
        const X* const x_row = a.x + row * a.x_row_stride + slab.first_column;
        if (row < a.rows) next_origin.load(a.x + row * a.x_row_stride, a.columns);
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (row < a.rows && own.holds(k)) next[k].load(x_row + own.at(k));
        }
    };
    load(blockIdx.y);
    int buffer = 0;
    for (int64 row = blockIdx.y; row < a.rows; row += gridDim.y) {
        Vector vectors[kVectors];
        const Compute origin = next_origin.value();
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            vectors[k] = next[k];
            count_from(origin, vectors[k], own.holds(k));
        }
        load(row + gridDim.y);
        const Sums<Compute> sums = moments_of(part, own, reciprocal_columns,
                                              [&](int k, Compute (&x)[kVector]) { vectors[k].unpack(x); },
                                              [&](int k) { return own.holds(k); },
                                              [&](Sums<Compute>& sums) { group_sum.all<false>(sums, kThreads, buffer); });
        if (threadIdx.x == 0) slab_sums(a, row)[blockIdx.x] = sums;
    }
}

// Sums over a row's slabs, by all lanes of a warp: term(sums, slab).
template <class Term> __device__ Compute over_slabs(const Sums<Compute>* slabs, Term term) {
    Sums<Compute> sum = {Compute(0), Compute(0)};
#pragma unroll 1
    for (int slab = threadIdx.x % 32; slab < int(gridDim.x); slab += 32) sum.first += term(slabs[slab], slab);
    sum_over_lanes<false, 32>(sum);
    return sum.first;
}

struct RowStatistics {
    Compute mean, rstd;  // the mean from the row's origin
    Compute origin;
};

__device__ inline RowStatistics statistics_of(const ForwardArguments& a, int64 row) {
    const Sums<Compute>* const slabs = slab_sums(a, row);
    const Compute reciprocal_columns = Compute(1) / Compute(a.columns);
    Compute mean = Compute(0);
    if constexpr (kLayerNorm) {
        mean = mean_of(over_slabs(slabs, [](const Sums<Compute>& own, int) { return own.second; }), reciprocal_columns);
    }
    const int last = gridDim.x - 1;
    const Compute columns = Compute(a.slab_columns), of_last = Compute(a.columns - last * a.slab_columns);
    const Compute reciprocal = Compute(1) / columns, reciprocal_of_last = Compute(1) / of_last;
    const Compute squares = over_slabs(slabs, [&](const Sums<Compute>& own, int slab) {
        if constexpr (!kLayerNorm) return own.first;
        // The slab's mean less the row's, times its columns.
        const Compute apart = fused(slab == last ? -of_last : -columns, mean, own.second);
        return fused(apart * (slab == last ? reciprocal_of_last : reciprocal), apart, own.first);
    });
    Origin origin = {};
    origin.load(a.x + row * a.x_row_stride, a.columns);
    return {mean, RootOfMean(a.eps).reciprocal(squares * reciprocal_columns), origin.value()};
}

// More rows at once gain more than the next one on its way (an H200, RMSNorm, bfloat16, N=400000, 667 MB of x and y: 378 us with two, the
// next on its way, 327 with three blocks on a multiprocessor).
// With two where three would spill.
constexpr bool kLacksRegisters = sizeof(Compute) == 8 || (kLayerNorm && kVector == 1 && __CUDA_ARCH__ >= 1000);
constexpr int kBlocksAtOnce = kLacksRegisters ? 2 : 3;
// Whether the first of some rows is on its way while their sums are put together: not where it would spill.
constexpr bool kLoadsFirst = sizeof(X) == 2;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksAtOnce) forward_split_apply(const ForwardArguments a) {
    const Slab slab(a);
    const Columns own(threadIdx.x, kThreads, slab.columns);
    const auto column_of = [&](int i) { return loaded_column(own, i); };
    Compute w[kVectors][kVector], b[kVectors][kVector];
    fill_columns(w, Compute(1));
    fill_columns(b, Compute(0));
    load_columns(as_loaded(w), column_address(a.w, a.w_code, slab.first_column), a.w_code, column_of);
    load_columns(as_loaded(b), column_address(a.b, a.b_code, slab.first_column), a.b_code, column_of);
    // As many rows at a time as there are warps, each of which puts the sums of one together.
    __shared__ RowStatistics of_rows[kThreads / 32];
    const int warp = threadIdx.x / 32;
    const auto row_of = [&](int64 first, int i) { return first + i * int64(gridDim.y); };
    for (int64 first = blockIdx.y; first < a.rows; first = row_of(first, kThreads / 32)) {
        Vector vectors[kVectors];
        const auto load = [&](int64 row) {
            const X* const x_row = a.x + row * a.x_row_stride + slab.first_column;
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                if (own.holds(k)) vectors[k].load_streaming(x_row + own.at(k));
            }
        };
        if constexpr (kLoadsFirst) load(first);
        if (const int64 row = row_of(first, warp); row < a.rows) {
            const RowStatistics statistics = statistics_of(a, row);
            if (threadIdx.x % 32 == 0) {
                of_rows[warp] = statistics;
                if (blockIdx.x == 0) {
                    a.rstd[row] = statistics.rstd;
                    if constexpr (kLayerNorm) a.mean[row] = statistics.origin + statistics.mean;
                }
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < kThreads / 32; ++i) {
            const int64 row = row_of(first, i);
            if (row >= a.rows) break;
            if (!kLoadsFirst || i > 0) load(row);
            const RowStatistics statistics = of_rows[i];
            X* const y_row = a.y + row * a.y_row_stride + slab.first_column;
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                if (!own.holds(k)) continue;
                Compute y[kVector];
                vectors[k].unpack(y);
                count_from(statistics.origin, y, true);
#pragma unroll
                for (int v = 0; v < kVector; ++v) {
                    const Compute centred = kLayerNorm ? y[v] - statistics.mean : y[v];
                    y[v] = centred * statistics.rstd * w[k][v] + b[k][v];
                }
                Vector packed;
                packed.pack(y);
                packed.store_streaming(y_row + own.at(k));
            }
        }
        __syncthreads();  // before the next rows' take the place of these
    }
}
