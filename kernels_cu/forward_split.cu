// Forward pass for rows of any length, in two sweeps over memory: what each part of a row comes to, then y.
//
// The route for rows that no cluster holds, and for long rows where there are no clusters. A row is split by columns over the
// slabs of blockIdx.x, 16 columns a thread (in float64 8); blockIdx.y walks rows. The first kernel writes a pair of
// sums per row and slab; every block of the second puts a row's pairs together (as forward.cuh says) and does the rest of its slab.
// x crosses memory twice, y once. Every warp of the second kernel reads all of a row's pairs, which are few up to some millions of
// columns. Orders of sums: a slab over a thread's columns, over lanes and warps by butterflies, the slabs of
// a row likewise.
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
    Compute next_origin = Compute(0);
    const auto load = [&](int64 row) {
        const X* const x_row = a.x + row * a.x_row_stride + slab.first_column;
        next_origin = origin_of(a.x + row * a.x_row_stride, row < a.rows);
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (row < a.rows && own.holds(k)) next[k].load(x_row + own.at(k));
        }
    };
    load(blockIdx.y);
    int buffer = 0;
    for (int64 row = blockIdx.y; row < a.rows; row += gridDim.y) {
        Vector vectors[kVectors];
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            vectors[k] = next[k];
            count_from(next_origin, vectors[k], own.holds(k));
        }
        load(row + gridDim.y);
        const Sums<Compute> sums = moments_of(part, own, reciprocal_columns,
                                              [&](int k, Compute (&x)[kVector]) { vectors[k].unpack(x); },
                                              [&](int k) { return own.holds(k); },
                                              [&](Sums<Compute>& sums) { group_sum.all<false>(sums, kThreads, buffer); });
        if (threadIdx.x == 0) slab_sums(a, row)[blockIdx.x] = sums;
    }
}

// Sums over a row's slabs, in every warp alike: term(sums, columns).
template <class Term> __device__ Compute over_slabs(const ForwardArguments& a, const Sums<Compute>* slabs, Term term) {
    Sums<Compute> sum = {Compute(0), Compute(0)};
    for (int slab = threadIdx.x % 32; slab < int(gridDim.x); slab += 32) {
        sum.first += term(slabs[slab], Compute(minimum(a.slab_columns, a.columns - slab * a.slab_columns)));
    }
    sum_over_lanes<false, 32>(sum);
    return sum.first;
}

// More rows at once gain more than the next one on its way (an H200, RMSNorm, bfloat16, N=400000, 667 MB of x and y: 378 us with two, the
// next on its way, 327 with three blocks on a multiprocessor).
constexpr int kBlocksAtOnce = sizeof(Compute) == 8 ? 2 : 3;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksAtOnce) forward_split_apply(const ForwardArguments a) {
    const Slab slab(a);
    const Columns own(threadIdx.x, kThreads, slab.columns);
    const auto column_of = [&](int i) { return loaded_column(own, i); };
    Compute w[kVectors][kVector], b[kVectors][kVector];
    fill_columns(w, Compute(1));
    fill_columns(b, Compute(0));
    load_columns(as_loaded(w), column_address(a.w, a.w_code, slab.first_column), a.w_code, column_of);
    load_columns(as_loaded(b), column_address(a.b, a.b_code, slab.first_column), a.b_code, column_of);
    const RootOfMean root(a.eps);
    const Compute reciprocal_columns = Compute(1) / Compute(a.columns);

    for (int64 row = blockIdx.y; row < a.rows; row += gridDim.y) {
        const X* const x_row = a.x + row * a.x_row_stride + slab.first_column;
        Vector vectors[kVectors];
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (own.holds(k)) vectors[k].load_streaming(x_row + own.at(k));
        }
        const Compute origin = origin_of(a.x + row * a.x_row_stride, true);
        const Sums<Compute>* const slabs = slab_sums(a, row);
        Compute mean = Compute(0);  // from the origin
        if constexpr (kLayerNorm) {
            const Compute sum = over_slabs(a, slabs, [](const Sums<Compute>& own, Compute) { return own.second; });
            mean = mean_of(sum, reciprocal_columns);
        }
        const Compute squares = over_slabs(a, slabs, [&](const Sums<Compute>& own, Compute columns) {
            if constexpr (!kLayerNorm) return own.first;
            const Compute apart = fused(-columns, mean, own.second);  // the slab's mean less the row's, times its columns
            return fused(apart / columns, apart, own.first);
        });
        const Compute rstd = root.reciprocal(squares * reciprocal_columns);
        X* const y_row = a.y + row * a.y_row_stride + slab.first_column;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (!own.holds(k)) continue;
            Compute y[kVector];
            vectors[k].unpack(y);
            count_from(origin, y, true);
#pragma unroll
            for (int v = 0; v < kVector; ++v) {
                const Compute centred = kLayerNorm ? y[v] - mean : y[v];
                y[v] = centred * rstd * w[k][v] + b[k][v];
            }
            Vector packed;
            packed.pack(y);
            packed.store_streaming(y_row + own.at(k));
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            a.rstd[row] = rstd;
            if constexpr (kLayerNorm) a.mean[row] = origin + mean;
        }
    }
}
