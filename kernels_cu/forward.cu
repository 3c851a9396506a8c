// Forward pass without clusters: y, and the row's mean and rstd.
//
// Two routes, one for a row that fits in the registers of a group of threads, one for longer rows, which a block reads
// again for every sweep (from the L2 cache where it can). Orders of sums: over a thread's columns, over lanes and warps
// by butterflies.
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
    const auto load = [&](int64 row) {
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
        Compute x[kVectors][kVector];
#pragma unroll
        for (int k = 0; k < kVectors; ++k) next[k].unpack(x[k]);
        load(row + step);

        Compute mean = Compute(0), centre = Compute(0), own_sum = Compute(0);
        if constexpr (kLayerNorm) {
            ThreadSum sum;
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
#pragma unroll
                for (int v = 0; v < kVector; ++v) sum.of(k, v) += x[k][v];
            }
            Sums<Compute> sums = sum.sums(own);
            own_sum = sums.first;
            group_sum.all<false>(sums, a.group_threads, buffer);
            mean = mean_of(sums.first, reciprocal_columns);
            centre = part.centre(own_sum, mean);
        }
        ThreadSum squares, distances;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (column_of(k) < a.columns) {
#pragma unroll
                for (int v = 0; v < kVector; ++v) {
                    if (kOddRows && column_of(k) + v >= a.columns) continue;
                    const Compute distance = x[k][v] - centre;
                    squares.of(k, v) += distance * distance;
                    if constexpr (ThreadPart::kSumsDistances) distances.of(k, v) += distance;
                }
            }
        }
        Sums<Compute> sums = squares.sums(own);
        sums.first = part.about(mean, centre, sums.first, own_sum, distances.sums(own).first);
        group_sum.all<false>(sums, a.group_threads, buffer);
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
                if constexpr (kLayerNorm) a.mean[row] = mean;
            }
        }
    }
}

#if NARROW_VECTOR == 1 && !ODD_ROWS  // longer rows have single elements, or vectors
// A long sum, compensated: its error stays that of a short one (Kahan, 1965).
struct LongSum {
    Compute sum = Compute(0), lost = Compute(0);

    __device__ void add(Compute term) {
        const Compute corrected = term - lost, next = sum + corrected;
        lost = next - next == Compute(0) ? (next - sum) - corrected : Compute(0);  // nothing to make good for an Inf
        sum = next;
    }
};

// A thread asks for so many vectors of a swept row at once, for one by one each would wait for memory; for fewer in the last sweep,
// where w and b take registers, too (an H200, N=300000, 100 MB, 92 → 72 us, by 1024 threads, not 512, 48).
constexpr int kSweptThreads = 1024;
constexpr int kSwept = kVector > 1 ? 4 : 32 / int(sizeof(Compute)), kSweptLast = kSwept / 4;

// A thread's vectors of a row, kCount at a time, a block's threads side by side.
template <int kCount> struct SweptColumns {
    int first, step, columns;

    __device__ int at(int k) const { return first + k * step; }
    __device__ bool holds(int k) const { return at(k) < columns; }
    __device__ void advance() { first += kCount * step; }
};

// Calls use(own, vectors) for kCount of a thread's vectors at a time.
template <int kCount, bool kStreaming, class Use> __device__ void sweep(const X* row, int columns, Use use) {
#pragma unroll 1
    for (SweptColumns<kCount> own = {int(threadIdx.x) * kVector, int(blockDim.x) * kVector, columns}; own.holds(0); own.advance()) {
        Vector vectors[kCount] = {};
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            if (!own.holds(k)) continue;
            if constexpr (kStreaming) vectors[k].load_streaming(row + own.at(k));
            else vectors[k].load(row + own.at(k));
        }
        use(own, vectors);
    }
}

extern "C" __global__ void __launch_bounds__(kSweptThreads, 1) forward_swept(const ForwardArguments a) {
    __shared__ GroupSum<Compute, kSweptThreads / 32> group_sum;
    int buffer = 0;
    for (int64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const X* const x_row = a.x + row * a.x_row_stride;
        Compute mean = Compute(0);
        if constexpr (kLayerNorm) {
            LongSum total;
            sweep<kSwept, false>(x_row, a.columns, [&](const auto&, const Vector (&vectors)[kSwept]) {
                Compute sum = Compute(0);
#pragma unroll
                for (int k = 0; k < kSwept; ++k) {  // 0 where there is none
                    Compute x[kVector];
                    vectors[k].unpack(x);
#pragma unroll
                    for (int v = 0; v < kVector; ++v) sum += x[v];
                }
                total.add(sum);
            });
            Sums<Compute> sums = {total.sum, Compute(0)};
            group_sum.all<false>(sums, blockDim.x, buffer);
            mean = sums.first / Compute(a.columns);
        }
        // What the first mean lost to rounding is found in the sum of the centred values, and put right in both.
        LongSum squares, rest;
        sweep<kSwept, false>(x_row, a.columns, [&](const auto& own, const Vector (&vectors)[kSwept]) {
            Compute own_squares = Compute(0), own_rest = Compute(0);
#pragma unroll
            for (int k = 0; k < kSwept; ++k) {
                if (!own.holds(k)) continue;
                Compute x[kVector];
                vectors[k].unpack(x);
#pragma unroll
                for (int v = 0; v < kVector; ++v) {
                    const Compute centred = x[v] - mean;
                    own_squares += centred * centred;
                    own_rest += centred;
                }
            }
            squares.add(own_squares);
            if constexpr (kLayerNorm) rest.add(own_rest);
        });
        Sums<Compute> sums = {squares.sum, rest.sum};
        group_sum.all<kLayerNorm>(sums, blockDim.x, buffer);
        Compute variance = sums.first / Compute(a.columns);
        if constexpr (kLayerNorm) {
            const Compute correction = sums.second / Compute(a.columns);
            mean += correction;
            variance -= correction * correction;
            if (variance < Compute(0)) variance = Compute(0);  // a NaN stays
        }
        const Compute rstd = RootOfMean(a.eps).reciprocal(variance);
        sweep<kSweptLast, true>(x_row, a.columns, [&](const auto& own, const Vector (&vectors)[kSweptLast]) {
            const auto column_of = [&](int k) { return own.holds(k) ? own.at(k) : -1; };
            Compute w[kSweptLast][kVector], b[kSweptLast][kVector];
            fill_columns(w, Compute(1));
            fill_columns(b, Compute(0));
            load_columns(w, a.w, a.w_code, column_of);
            load_columns(b, a.b, a.b_code, column_of);
#pragma unroll
            for (int k = 0; k < kSweptLast; ++k) {
                if (!own.holds(k)) continue;
                Compute y[kVector];
                vectors[k].unpack(y);
#pragma unroll
                for (int v = 0; v < kVector; ++v) y[v] = (y[v] - mean) * rstd * w[k][v] + b[k][v];
                Vector packed;
                packed.pack(y);
                packed.store_streaming(a.y + row * a.y_row_stride + own.at(k));
            }
        });
        if (threadIdx.x == 0) {
            a.rstd[row] = rstd;
            if constexpr (kLayerNorm) a.mean[row] = mean;
        }
    }
}
#endif
