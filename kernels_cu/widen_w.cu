// w where it has neither x's type nor the arithmetic's, converted to the latter (float64 rounded to float32), for the backward
// kernels. These read the two alone: for all four types they would take up to a tenth longer to compile, off 16 bytes a fifth.
//
// Compile-time switch: COMPUTE_TYPE, of the arithmetic.
#include "element.cuh"

using Compute = COMPUTE_TYPE;

struct WideningArguments {
    const void* w;
    Compute* widened;
    int columns, w_code;
};
static_assert(sizeof(WideningArguments) == ARGUMENT_BYTES, "the Python side packs the same struct");

extern "C" __global__ void widen_w(const WideningArguments a) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= a.columns) return;
    Compute w[1][1];
    load_columns(w, a.w, a.w_code, [&](int) { return column; });
    a.widened[column] = w[0][0];
}
