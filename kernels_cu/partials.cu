// The final reduction: dw and db from the partial rows that the backward kernels leave, in a fixed order.
//
// A thread adds up four columns of the partial rows that are its share: row number row_threads, 2·row_threads, … on from
// its own. The threads that share columns then add up theirs: lanes of a warp by a butterfly, warps in order; all in
// float64, so that dw and db are rounded once here. blockIdx.y selects dw or db.
//
// The blocks may be launched while the kernel that writes the partials still runs; they wait for its end.
#include "overlap.cuh"
#include "partials.cuh"

using Compute = COMPUTE_TYPE;
static_assert(!ACCUMULATE, "reserved, and 0 so far: 1 adds to what dw and db hold");

struct PartialsArguments {
    const Compute *dw_partials, *db_partials;  // null where not wanted
    void *dw, *db;
    int64 rows;
    int columns;
    int code;         // ElementCode of dw and db
    int row_threads;  // threads that share a column, a power of two
};
static_assert(sizeof(PartialsArguments) == ARGUMENT_BYTES, "the Python side packs the same struct");

constexpr int kRun = 4;  // columns of a thread
constexpr int kMaxThreads = 256;

extern "C" __global__ void __launch_bounds__(kMaxThreads, 5) reduce_partials(const PartialsArguments a) {
    __shared__ double shared_sums[kMaxThreads * kRun];
    const Compute* partials = blockIdx.y ? a.db_partials : a.dw_partials;
    if (!partials) return;
    const int column_threads = blockDim.x / a.row_threads, block_columns = column_threads * kRun;
    const int row_thread = threadIdx.x / column_threads;
    const int first_column = blockIdx.x * block_columns, own = threadIdx.x % column_threads * kRun;
    const int64 stride = partial_row_stride(a.columns);
    partials += first_column + own;
    wait_for_previous_kernel();

    double sums[kRun] = {};
    if (first_column + own < a.columns) {
#pragma unroll 4
        for (int64 row = row_thread; row < a.rows; row += a.row_threads) {
            Packed<Compute, kRun> packed;
            double values[kRun];
            packed.load(partials + row * stride);
            packed.unpack(values);
#pragma unroll
            for (int i = 0; i < kRun; ++i) sums[i] += values[i];
        }
    }
    for (int distance = 16; distance >= column_threads; distance /= 2) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], distance);
    }
    const int lane_rows = column_threads < 32 ? 32 / column_threads : 1;  // of which one goes on
    if (row_thread % lane_rows == 0) {
        double* const entry = shared_sums + row_thread / lane_rows * block_columns + own;
#pragma unroll
        for (int i = 0; i < kRun; ++i) entry[i] = sums[i];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < block_columns; column += blockDim.x) {
        if (first_column + column >= a.columns) break;
        double sum = shared_sums[column];
#pragma unroll 4
        for (int i = 1; i < a.row_threads / lane_rows; ++i) sum += shared_sums[i * block_columns + column];
        store_element(blockIdx.y ? a.db : a.dw, a.code, first_column + column, sum);
    }
}
