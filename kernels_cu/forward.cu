// Forward pass for rows that fit in the registers of a group of threads, without clusters: y, and the row's mean and rstd.
//
// Longer rows: forward_split.cu. Orders of sums: over a thread's columns, over lanes and warps by butterflies.
#include "forward.cuh"

constexpr int kMaxThreads = VECTOR && !PART_OF_WARP ? 512 : 256;  // off 16 bytes, and of many columns, a thread takes more registers

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1) forward_direct(const ForwardArguments a) {
    __shared__ GroupSum<Compute, kMaxThreads / 32> group_sum;
    const int groups = a.groups;
    const int group = threadIdx.x / a.group_threads, thread = threadIdx.x % a.group_threads;
    const auto column_of = [&](int k) { return (k * a.group_threads + thread) * kVector; };
    const Columns own(thread, a.group_threads, a.columns);  // of rows of a warp or less
    const PairsHeld held(own);

    const auto own_column = [&](int i) {  // of load i of w or b
        const int first = column_of(i * kLoaded / kVector), column = first + i * kLoaded % kVector;
        return (kOddRows ? column : first) < a.columns ? column : -1;
    };
    Compute w[kVectors][kVector], b[kVectors][kVector];
    fill_columns(w, Compute(1));
    fill_columns(b, Compute(0));
    load_columns(as_loaded(w), a.w, a.w_code, own_column);
    load_columns(as_loaded(b), a.b, a.b_code, own_column);

    // The next row is on its way while one is at work. Columns that the thread does not hold stay 0.
    const int64 step = int64(gridDim.x) * groups;
    Vector next[kVectors] = {};
    Origin next_origin = {};
    const auto load = [&](int64 row) {
        if (row < a.rows) next_origin.load(a.x + row * a.x_row_stride, a.columns);
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            const Held own_of = row < a.rows ? held.of(k, column_of(k) < a.columns) : Held(0);
            load_held(next[k], a.x + row * a.x_row_stride + column_of(k), own_of);
        }
    };
    load(int64(blockIdx.x) * groups + group);

    const RootOfMean root(a.eps);
    const ThreadPart part([&](int k) { return column_of(k) < a.columns; });
    const Compute reciprocal_columns = Compute(1) / Compute(a.columns);
    int buffer = 0;
    for (int64 first_row = int64(blockIdx.x) * groups; first_row < a.rows; first_row += step) {
        const int64 row = first_row + group;
        const bool active = row < a.rows;
        const Compute origin = next_origin.value();
        Compute x[kVectors][kVector];
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            next[k].unpack(x[k]);
            count_from(origin, x[k], column_of(k) < a.columns);
        }
        load(row + step);

        const Sums<Compute> sums = moments_of(part, own, reciprocal_columns,
                                              [&](int k, Compute (&of)[kVector]) {
#pragma unroll
                                                  for (int v = 0; v < kVector; ++v) of[v] = x[k][v];
                                              },
                                              [&](int k) { return held.of(k, column_of(k) < a.columns); },
                                              [&](Sums<Compute>& sums) {
                                                  group_sum.all<false>(sums, a.group_threads, buffer);
                                              });
        const Compute mean = kLayerNorm ? mean_of(sums.second, reciprocal_columns) : Compute(0);
        const Compute rstd = root.reciprocal(sums.first * reciprocal_columns);

        if (active) {
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                if (column_of(k) < a.columns) {
#pragma unroll
                    for (int v = 0; v < kVector; ++v) {
                        const Compute centred = kLayerNorm ? x[k][v] - mean : x[k][v];
                        x[k][v] = centred * rstd * w[k][v] + b[k][v];
                    }
                    Vector packed;
                    packed.pack(x[k]);
                    store_held<true>(packed, a.y + row * a.y_row_stride + column_of(k), held.of(k, true));
                }
            }
            if (thread == 0) {
                a.rstd[row] = rstd;
                if constexpr (kLayerNorm) a.mean[row] = origin + mean;
            }
        }
    }
}
