// The final reduction: dw and db from the blocks' partial rows, in a fixed order.
//
// A block owns 32 columns; its 32 warps take the partial rows in turn (warp i: rows i, i + 32, …), a lane a column,
// then one warp adds the 32 sums in order. blockIdx.y selects dw or db.
#include "element.cuh"

using Compute = COMPUTE_TYPE;

struct PartialsArguments {
    const Compute *dw_partials, *db_partials;  // rows × columns; null where not wanted
    void *dw, *db;
    int64 rows;
    int columns;
    int code;  // ElementCode of the results
};
static_assert(sizeof(PartialsArguments) == ARGUMENT_BYTES, "the Python side packs the same struct");

constexpr int kWarps = 32;

extern "C" __global__ void __launch_bounds__(32 * kWarps) reduce_partials(const PartialsArguments a) {
    __shared__ Compute sums[kWarps][32];
    const Compute* partials = blockIdx.y ? a.db_partials : a.dw_partials;
    if (!partials) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = blockIdx.x * 32 + lane;
    Compute sum = Compute(0);
    if (column < a.columns) {
#pragma unroll 4
        for (int64 row = warp; row < a.rows; row += kWarps) sum += partials[row * a.columns + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < a.columns) {
        sum = Compute(0);
#pragma unroll
        for (int i = 0; i < kWarps; ++i) sum += sums[i][lane];
        store_element(blockIdx.y ? a.db : a.dw, a.code, column, sum);
    }
}
