// What all forward kernels share: arguments, derived sizes, the root.
//
//     LayerNorm: mean = Σx / N, rstd = 1/sqrt(Σ(x − mean)² / N + eps)        RMSNorm: rstd = 1/sqrt(Σx² / N + eps)
//     y = (x − mean)·rstd·w + b
//
// The variance is always that of centred values. Parts of a row are centred about their own means, so that less has to wait, and
// put together (Chan, Golub and LeVeque, 1979). With n columns in a part, squares q of the distances from its mean, rounded, and
// the mean that others have, too: a warp adds q + (S − n·mean)² / n to the row's squares, S its columns' sum, the product not
// rounded; a thread q + a·(2·D + n·a) to the warp's, a the difference of the means and D the sum of its distances.
//
// Compile-time switches: LAYER_NORM, X_TYPE, VECTOR, COLUMNS_PER_THREAD, PART_OF_WARP as in backward.cuh; reserved, and 0
// so far: WEIGHT_OFFSET (w + offset in place of w), PER_HEAD (one w for each head), ADD_RESIDUAL (x + residual in place of
// x); ACCUMULATE is of the backward pass.
#pragma once

#include "counters.cuh"
#include "element.cuh"
#include "reduce.cuh"

static_assert(!WEIGHT_OFFSET && !PER_HEAD && !ADD_RESIDUAL, "reserved switches");

constexpr bool kLayerNorm = LAYER_NORM;
using X = X_TYPE;
using Compute = typename ComputeOf<X>::type;

constexpr int kColumnsPerThread = COLUMNS_PER_THREAD;
constexpr int kWideVector = VECTOR ? 16 / int(sizeof(X)) : NARROW_VECTOR;
constexpr int kVector = kOddRows ? 2 : kColumnsPerThread % kWideVector ? kWideVector / 2 : kWideVector;
constexpr int kVectors = kColumnsPerThread / kVector;
static_assert(kVectors * kVector == kColumnsPerThread, "the vectors cover a thread's columns exactly");

#include "columns.cuh"

struct ForwardArguments {
    const X* x;
    const void *w, *b;  // null: ones, zeros
    X* y;
    Compute *mean, *rstd;
    void* sums;             // split route: Sums<Compute> of rows × slabs
    StepCounter* counters;  // staged route
    int64 rows;
    int64 walk_rows;     // staged route: those that are divided beforehand
    int64 x_row_stride, y_row_stride;  // in elements
    double eps;
    int columns;
    int w_code, b_code;  // ElementCode
    int group_threads;   // threads that share a row
    int slab_columns;    // columns of a row that one block holds (not on the direct route)
    int stages;          // staged route: steps in flight
    int steps;           // staged route: at least so many of each walk over the rows
    int groups;          // of a block
    int drawn_steps;     // staged route: those that are drawn
    short lead;          // staged route: of Pace, in quarters of a step; 0: no pace is kept
    short step_counters;
};
static_assert(sizeof(ForwardArguments) == ARGUMENT_BYTES, "the Python side packs the same struct");

using Vector = RowVector<X, kVector>;

// The sum of a thread's columns, in several chains: one would wait for itself. Of an odd row as sum_chains() has them.
struct ThreadSum {
    static constexpr int kCount = kVector > 1 && !kOddRows ? 4 : 2;
    Compute chains[kCount] = {};

    __device__ Compute& of(int k, int v) { return chains[(k * kVector + v) % kCount]; }
    __device__ Sums<Compute> sums(const Columns& own) const {
        if constexpr (kOddRows) {
            const Sums<Compute> both[2] = {{chains[0], Compute(0)}, {chains[1], Compute(0)}};
            return sum_chains<false>(both, own);
        }
        Compute sum = chains[0] + chains[1];
        if constexpr (kCount == 4) sum += chains[2] + chains[3];
        return {sum, Compute(0)};
    }
};

// Of a sum, rounded here: contracted with what the mean is taken from, other bits would come out, on one route and not on another.
__device__ inline float32 mean_of(float32 sum, float32 reciprocal_columns) { return __fmul_rn(sum, reciprocal_columns); }
__device__ inline float64 mean_of(float64 sum, float64 reciprocal_columns) { return __dmul_rn(sum, reciprocal_columns); }

// What a row's columns are counted from, all the way to y. Far from zero sums are exact to the columns' size, not to their deviation,
// which costs rstd and y as many bits; so of wider types than 16 bits LayerNorm takes the first element from all of them, if the
// middle one and the last are near it: then these are far from zero, or the row is constant, and has no variance. Of another row
// its origin is 0, for one element far from the others would cost them bits. Sums of 16-bit columns are as good as exact.
constexpr bool kHasOrigin = kLayerNorm && sizeof(X) > 2;

struct Origin {
    Compute first, middle, last;

    // Of a row of so many columns.
    __device__ void load(const X* row, int columns) {
        if constexpr (kHasOrigin) {
            first = element(row);
            middle = element(row + columns / 2);
            last = element(row + columns - 1);
        }
    }
    __device__ Compute value() const {
        if constexpr (!kHasOrigin) return Compute(0);
        const Compute near = absolute(first) * Compute(0.125);
        return absolute(middle - first) <= near && absolute(last - first) <= near ? first : Compute(0);
    }

private:
    __device__ static Compute element(const X* at) {
        Packed<X, 1> packed;
        Compute widened[1];
        packed.load(at);
        packed.unpack(widened);
        return widened[0];
    }
    __device__ static Compute absolute(Compute value) { return value < Compute(0) ? -value : value; }
};

// A vector's columns, if the thread holds it.
__device__ inline void count_from(Compute origin, Compute (&x)[kVector], bool holds) {
    if constexpr (kHasOrigin) {
        const Compute less = holds ? origin : Compute(0);
#pragma unroll
        for (int v = 0; v < kVector; ++v) x[v] -= less;
    }
}
__device__ inline void count_from(Compute origin, Vector& vector, bool holds) {
    if constexpr (kHasOrigin) {
        Compute x[kVector];
        vector.unpack(x);
        count_from(origin, x, holds);
        vector.pack(x);
    }
}

// The part of a row that a thread has. LayerNorm's squares are of its columns about their own mean, for the warp's comes later,
// by five shuffles (an H100, 8192, 25 MB, 12.0 → 11.6 us, 100 MB 29.5 → 29.0). Not of single columns, for which registers are
// short, nor of odd rows, whose sums go from lane to lane.
struct ThreadPart {
    static constexpr bool kCentred = kLayerNorm && !kOddRows && kVector > 1;

    Compute columns, reciprocal_columns;

    // holds(k): whether the thread has vector k.
    template <class Holds> __device__ explicit ThreadPart(Holds holds) : columns(0), reciprocal_columns(0) {
        if constexpr (kCentred) {
            int held = 0;
#pragma unroll
            for (int k = 0; k < kVectors; ++k) held += holds(k) ? kVector : 0;
            columns = Compute(held);
            reciprocal_columns = held ? Compute(1) / columns : Compute(0);
        }
    }
    // What its squares are taken about: `own_sum` is of its columns, `mean` of the warp's, or the group's.
    __device__ Compute centre(Compute own_sum, Compute mean) const {
        return kCentred ? mean_of(own_sum, reciprocal_columns) : mean;
    }
    // Squares about `centre` as part of those about `mean`. A mean is rounded: what it leaves of the columns' sum is put back.
    __device__ Compute about(Compute mean, Compute centre, Compute squares, Compute own_sum) const {
        if constexpr (!kCentred) return squares;
        const Compute left = fused(-columns, centre, own_sum), apart = centre - mean;
        return fused(apart, fused(columns, apart, left + left), squares);
    }
};

// What those columns of a row come to that some threads hold: the squares of their distances from their own mean, and their sum
// (RMSNorm: their squares, and 0). add_up(sums) is over these threads, whose columns have `reciprocal_columns`; unpack(k, x)
// takes this thread's vector k, zeros where there is no column, and holds(k) says what is (Held of element.cuh).
template <class Unpack, class Holds, class AddUp>
__device__ Sums<Compute> moments_of(const ThreadPart& part, const Columns& own, Compute reciprocal_columns, Unpack unpack,
                                    Holds holds, AddUp add_up) {
    Compute x[kVector], mean = Compute(0), centre = Compute(0), own_sum = Compute(0), sum_of_all = Compute(0);
    if constexpr (kLayerNorm) {
        ThreadSum sum;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            unpack(k, x);
#pragma unroll
            for (int v = 0; v < kVector; ++v) sum.of(k, v) += x[v];
        }
        Sums<Compute> sums = sum.sums(own);
        own_sum = sums.first;
        add_up(sums);
        sum_of_all = sums.first;
        mean = mean_of(sum_of_all, reciprocal_columns);
        centre = part.centre(own_sum, mean);
    }
    ThreadSum squares;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
        unpack(k, x);
        const Held held = holds(k);
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
            const Compute centre_of = (kOddRows ? held >> 16 * v & 1 : held) ? centre : Compute(0);
            const Compute distance = kLayerNorm ? x[v] - centre_of : x[v];
            squares.of(k, v) += distance * distance;
        }
    }
    Sums<Compute> sums = squares.sums(own);
    sums.first = part.about(mean, centre, sums.first, own_sum);
    add_up(sums);
    return {sums.first, sum_of_all};
}

// 1 / sqrt(x), to half a unit in the last place and little more, above 1e30, where `rest` is flushed, to less than a unit: an
// approximation and one step of Halley's. __frsqrt_rn() also scales numbers near the ends of float32's range, by branches in every
// row (LayerNorm, N=66560, 1 GB, 204.4 → 199.8 us); there the approximation stands, to two units.
__device__ inline float32 root_of(float32 x) {
    float32 root;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
    const float32 square = __fmul_rn(root, root), rest = fused(root, root, -square);
    const float32 residual = fused(-x, rest, fused(-x, square, 1.0f));
    const float32 better = fused(fused(residual, 0.375f, 0.5f), __fmul_rn(root, residual), root);
    return x > 1e-37f && x < 1e37f ? better : root;
}

// 1 / sqrt(mean_square + eps)
struct RootOfMean {
    double eps;
    bool in_double;

    __device__ explicit RootOfMean(double eps)
        : eps(eps), in_double(sizeof(Compute) == 8 || (eps > 0 && eps < 1e-37) || eps > 1e37) {}  // no float32
    __device__ Compute reciprocal(Compute mean_square) const {
        if (in_double) return Compute(1) / Compute(sqrt(double(mean_square) + eps));
        return Compute(root_of(float(mean_square) + float(eps)));
    }
};
