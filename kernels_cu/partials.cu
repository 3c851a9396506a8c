// The final reduction: dw and db from the partial rows that the backward kernels leave, in a fixed order.
//
// A block owns 32 columns, a lane each; its warps take the partial rows in turn (warp i: rows i, i + warps, …), then the
// first warp adds their sums in order, all in float64, so that dw and db are rounded once here. blockIdx.y selects
// dw or db.
//
// The blocks may be launched while the kernel that writes the partials still runs; they wait for its end.
#include "element.cuh"
#include "overlap.cuh"

using Compute = COMPUTE_TYPE;
static_assert(!ACCUMULATE, "reserved, and 0 so far: 1 adds to what dw and db hold");

struct PartialsArguments {
    const Compute *dw_partials, *db_partials;  // rows × columns; null where not wanted
    void *dw, *db;
    int64 rows;
    int columns;
    int code;  // ElementCode of dw and db
};
static_assert(sizeof(PartialsArguments) == ARGUMENT_BYTES, "the Python side packs the same struct");

constexpr int kMaxWarps = 32;

extern "C" __global__ void __launch_bounds__(32 * kMaxWarps) reduce_partials(const PartialsArguments a) {
    __shared__ double sums[kMaxWarps][32];
    const Compute* partials = blockIdx.y ? a.db_partials : a.dw_partials;
    if (!partials) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int column = blockIdx.x * 32 + lane;
    wait_for_previous_kernel();
    double sum = 0;
    if (column < a.columns) {
#pragma unroll 8
        for (int64 row = warp; row < a.rows; row += warps) sum += double(partials[row * a.columns + column]);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < a.columns) {
        for (int i = 1; i < warps; ++i) sum += sums[i][lane];
        store_element(blockIdx.y ? a.db : a.dw, a.code, column, sum);
    }
}
