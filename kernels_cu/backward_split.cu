// Backward pass for rows of any length, in two sweeps over memory: the sums of every row, then dx, dw and db.
//
// The route for rows that fit on no chip, and for long rows where there are no clusters. A row is split by columns over
// `slabs` blocks of blockIdx.x, 16 columns a thread (8 in float64); blockIdx.y walks rows. The first kernel writes one
// pair of sums per row and slab; the second adds a row's pairs and does the rest. x and dy cross memory twice, dx once.
// Orders of sums: a row over a thread's columns, over lanes and warps by butterflies, over the slabs likewise.
#include "backward.cuh"
#include "slab.cuh"

constexpr int kThreads = 256;

// ANY_W  1: w is of any type, for converted beforehand it would take more than KEPT_BYTES of config/walkers.py. Kernels for
//           it take 2 to 7% longer, whatever its type.
#ifndef ANY_W
#define ANY_W 0
#endif

__device__ inline Weights<> weights_of(const BackwardArguments& a, const Slab& slab, const Columns& own) {
    const void* const first_column = column_address(a.w, a.w_code, slab.first_column);
    Weights<> w;
    if constexpr (ANY_W) {
        w.load(nullptr, kNone, own);  // ones, and zeros
        load_columns(as_loaded(w.own), first_column, a.w_code, [&](int i) { return loaded_column(own, i); });
    } else {
        w.load(first_column, a.w_code, own);
    }
    return w;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) backward_split_sums(const BackwardArguments a) {
    __shared__ Sums<Compute> warp_sums[2][kThreads / 32];
    const Slab slab(a);
    const Columns own(threadIdx.x, kThreads, slab.columns);
    const Weights<> w = weights_of(a, slab, own);

    int buffer = 0;
    for (int64 row = blockIdx.y; row < a.rows; row += gridDim.y, buffer ^= 1) {
        RowStatistics statistics;
        statistics.load(a, row);
        Sums<Compute> sums = {Compute(0), Compute(0)};
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (own.holds(k)) {
                XVector x;
                DyVector dy;
                x.load(a.x + row * a.x_row_stride + slab.first_column + own.at(k));
                dy.load(a.dy + row * a.dy_row_stride + slab.first_column + own.at(k));
                first_half<true, false>(&sums, nullptr, k, x, dy, w, statistics);
            }
        }
        sum_over_lanes<kLayerNorm, 32>(sums);
        if (threadIdx.x % 32 == 0) warp_sums[buffer][threadIdx.x / 32] = sums;
        __syncthreads();
        if (threadIdx.x < 32) {
            sums = sum_entries<kLayerNorm, kThreads / 32>(warp_sums[buffer], kThreads / 32);
            if (threadIdx.x == 0) static_cast<Sums<Compute>*>(a.sums)[row * gridDim.x + blockIdx.x] = sums;
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) backward_split_apply(const BackwardArguments a) {
    extern __shared__ uint4 shared[];
    if (a.meeting) a.meeting->start();
    const Slab slab(a);
    const Columns own(threadIdx.x, kThreads, slab.columns);
    ColumnSums column_sums(shared, threadIdx.x, kThreads, own);
    const Weights<> w = weights_of(a, slab, own);
    const Compute reciprocal_columns = Compute(1) / Compute(a.columns);

    for (int64 row = blockIdx.y; row < a.rows; row += gridDim.y) {
        XVector x[kVectors];
        DyVector dy[kVectors];
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (own.holds(k)) {
                x[k].load_streaming(a.x + row * a.x_row_stride + slab.first_column + own.at(k));
                dy[k].load_streaming(a.dy + row * a.dy_row_stride + slab.first_column + own.at(k));
            }
        }
        RowStatistics statistics;
        statistics.load(a, row);
        Sums<Compute> sums = {Compute(0), Compute(0)};
        if (a.dx) sums = sum_many_entries<kLayerNorm>(static_cast<const Sums<Compute>*>(a.sums) + row * gridDim.x, gridDim.x);
        const RowCoefficients coefficients(sums, reciprocal_columns, statistics);
        X* const dx = a.dx + row * a.dx_row_stride + slab.first_column;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (own.holds(k)) {
                first_half<false, true>(&sums, &column_sums, k, x[k], dy[k], w, statistics);
                if (a.dx) second_half(k, x[k], dy[k], w, statistics, coefficients).store_streaming(dx + own.at(k));
            }
        }
        column_sums.row_done(kThreads);
    }

    column_sums.row_done(kThreads, true);
    const Attendance attendance = publish_columns(a, column_sums, blockIdx.y, slab.first_column, own, kThreads);
    reduce_partials<kReductionBatch, 8, Compute>(a, attendance, shared, slab.first_column, slab.columns);
}
