// Backward pass for rows that fit in the registers of one block: memory → registers → memory.
//
// A group of `group_threads` threads (a power of two up to 32, or several warps, which then are the whole block) holds
// one row, 16 columns a thread (8 in float64); a block of several groups holds several rows. Blocks walk rows with the
// grid's stride. In registers: this thread's x and dy between their two uses, its w, its dw and db. In shared memory:
// the second level of dw and db, and the warps' sums of a row. To memory: x, dy and dx once; one partial row of dw and
// db for each block. Orders of sums: a row over its lanes by a butterfly, then over its warps likewise; a
// column over 16 rows, over these in turn, over the block's groups.
#include "backward.cuh"

// The threads that the registers allow: only 16-bit vectors stay under 128 registers a thread.
constexpr int kMaxThreads = kVector > 1 && sizeof(X) == 2 && sizeof(Dy) == 2 ? 512 : 256;

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1) backward_direct(const BackwardArguments a) {
    extern __shared__ uint4 shared[];
    __shared__ GroupSum<Compute, kMaxThreads / 32> group_sum;

    const int groups = blockDim.x / a.group_threads;
    const int group = threadIdx.x / a.group_threads;
    const Columns own(threadIdx.x % a.group_threads, a.group_threads, a.columns);
    ColumnSums column_sums(shared, blockDim.x);
    Weights w;
    load_weights(w, a, own, 0);

    const Compute reciprocal_columns = Compute(1) / Compute(a.columns);
    int buffer = 0;
    for (int64 first_row = int64(blockIdx.x) * groups; first_row < a.rows; first_row += int64(gridDim.x) * groups) {
        const int64 row = first_row + group;
        const bool active = row < a.rows;  // the last block may have more groups than rows
        Packed<X, kVector> x[kVectors];
        Packed<Dy, kVector> dy[kVectors];
        RowStatistics statistics;
        if (active) {
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                if (own.holds(k)) {
                    x[k].load_streaming(a.x + row * a.x_row_stride + own.at(k));
                    dy[k].load_streaming(a.dy + row * a.dy_row_stride + own.at(k));
                }
            }
            statistics.load(a, row);
        }

        Sums<Compute> sums = {Compute(0), Compute(0)};
        if (a.dx) {
            if (active) {
#pragma unroll
                for (int k = 0; k < kVectors; ++k) {
                    if (own.holds(k)) add_to_sums(sums, x[k], dy[k], w[k], statistics);
                }
            }
            group_sum.all<kLayerNorm>(sums, a.group_threads, buffer);
        }

        if (active) {
            const RowCoefficients coefficients(sums, reciprocal_columns, statistics.rstd);
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                if (own.holds(k)) {
                    finish_vector(a, column_sums, k, x[k], dy[k], w[k], statistics, coefficients,
                                  a.dx + row * a.dx_row_stride + own.at(k));
                }
            }
            column_sums.row_done();
        }
    }

    if (a.dw_partials || a.db_partials) {
        column_sums.flush();
        __syncthreads();
        column_sums.write_partials(a, blockIdx.x, 0, a.columns, a.group_threads);
    }
}
