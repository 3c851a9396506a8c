// What all forward kernels share: arguments, derived sizes, the root.
//
//     LayerNorm: mean = Σx / N, rstd = 1/sqrt(Σ(x − mean)² / N + eps)        RMSNorm: rstd = 1/sqrt(Σx² / N + eps)
//     y = (x − mean)·rstd·w + b
//
// The variance is always that of centred values: rows far from zero lose nothing.
//
// Compile-time switches: LAYER_NORM, X_TYPE, VECTOR, COLUMNS_PER_THREAD as in backward.cuh; reserved, and 0 so far:
// WEIGHT_OFFSET (w + offset in place of w), PER_HEAD (one w for each head), ADD_RESIDUAL (x + residual in place of x).
#pragma once

#include "element.cuh"
#include "reduce.cuh"

static_assert(!WEIGHT_OFFSET && !PER_HEAD && !ADD_RESIDUAL, "reserved switches");

constexpr bool kLayerNorm = LAYER_NORM;
using X = X_TYPE;
using Compute = typename ComputeOf<X>::type;

constexpr int kColumnsPerThread = COLUMNS_PER_THREAD;
constexpr int kVector = VECTOR ? 16 / int(sizeof(X)) : 1;
constexpr int kVectors = kColumnsPerThread / kVector;
static_assert(kVectors * kVector == kColumnsPerThread, "the vectors cover a thread's columns exactly");

#include "columns.cuh"

struct ForwardArguments {
    const X* x;
    const void *w, *b;  // null: ones, zeros
    X* y;
    Compute *mean, *rstd;
    int64 rows;
    int64 x_row_stride, y_row_stride;  // in elements
    double eps;
    int columns;
    int w_code, b_code;  // ElementCode
    int group_threads;   // threads that share a row
    int slab_columns;    // staged route: columns of a row that one block holds
    int stages;          // staged route: steps in flight
};
static_assert(sizeof(ForwardArguments) == ARGUMENT_BYTES, "the Python side packs the same struct");

using Vector = Packed<X, kVector>;

__device__ inline Compute reciprocal_root(Compute mean_square, double eps) {
    const bool in_double = sizeof(Compute) == 8 || (eps > 0 && eps < 1e-37);  // too small for a float32
    const Compute root = in_double ? Compute(sqrt(double(mean_square) + eps))
                                   : Compute(sqrtf(float(mean_square) + float(eps)));
    return Compute(1) / root;
}
