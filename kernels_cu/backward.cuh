// What all backward kernels share: arguments, derived sizes, the arithmetic of a row, the column sums.
//
// With x̂ = (x − mean)·rstd (RMSNorm: mean = 0) and g = dy·w, for each row of `columns`:
//
//     c1 = mean(g·x̂)   c2 = mean(g) (RMSNorm: 0)   dx = (g − x̂·c1 − c2)·rstd   dw = Σ_rows dy·x̂   db = Σ_rows dy
//
// Compile-time switches, given by -D:
//   LAYER_NORM  0: RMSNorm, 1: LayerNorm
//   X_TYPE      element type of x and dx          DY_TYPE  element type of dy
//   WANT_DB     1: db is summed as well           VECTOR   1: 16-byte accesses, 0: single elements
//   COLUMNS_PER_THREAD
//   WEIGHT_OFFSET  1: w + offset in place of w    PER_HEAD  1: one w for each head
//   ADD_RESIDUAL   1: dresidual_out is added to dx
// Decided at run time, because it costs nothing: the type of w, and whether dx and dw are wanted (null pointers).
#pragma once

#include "element.cuh"
#include "reduce.cuh"

constexpr bool kLayerNorm = LAYER_NORM;
constexpr bool kWantDb = WANT_DB;

// Reserved, and 0 so far; a kernel that honours one takes it out of the assertion.
static_assert(!WEIGHT_OFFSET && !PER_HEAD && !ADD_RESIDUAL, "reserved switches");

using X = X_TYPE;
using Dy = DY_TYPE;

template <class T> struct ComputeOf { using type = float; };
template <> struct ComputeOf<double> { using type = double; };
using Compute = typename ComputeOf<X>::type;

constexpr int kColumnsPerThread = COLUMNS_PER_THREAD;
constexpr int kVector = VECTOR ? 16 / minimum(sizeof(X), sizeof(Dy)) : 1;
constexpr int kVectors = kColumnsPerThread / kVector;
static_assert(kVectors * kVector == kColumnsPerThread, "the vectors cover a thread's columns exactly");

// A thread adds this many rows into registers before it adds the registers into shared memory: two levels keep the
// error of long float32 sums at that of short ones. Relative to the sum, n terms cost about 2.5e-8·sqrt(n/2).
constexpr int kRowsPerFlush = 16;

struct BackwardArguments {
    const X* x;
    const Dy* dy;
    const void* w;          // null: ones
    const Compute* mean;    // LayerNorm
    const Compute* rstd;
    X* dx;                  // null: not wanted
    Compute* dw_partials;   // null: not wanted; one row of `columns` for each block or cluster
    Compute* db_partials;
    Sums<Compute>* sums;    // split route: rows × slabs
    int64 rows;
    int64 x_row_stride, dy_row_stride, dx_row_stride;  // in elements
    int columns;
    int w_code;             // ElementCode
    int group_threads;      // threads that share a row
    int slab_columns;       // columns of a row that one block holds
    int stages;             // staged route: rows in flight
    int slabs;              // blocks that share a row
};
static_assert(sizeof(BackwardArguments) == ARGUMENT_BYTES, "the Python side packs the same struct");

// The constants of one row.
struct RowStatistics {
    Compute mean, rstd;

    __device__ void load(const BackwardArguments& a, int64 row) {
        rstd = a.rstd[row];
        if constexpr (kLayerNorm) mean = a.mean[row];
    }
    __device__ Compute x_hat(Compute x) const {
        if constexpr (kLayerNorm) x -= mean;
        return x * rstd;
    }
};

// What a row's sums come down to: dx = (g − x̂·c1)·rstd − shift, with shift = c2·rstd.
struct RowCoefficients {
    Compute c1, shift, rstd;

    __device__ RowCoefficients(const Sums<Compute>& sums, Compute reciprocal_columns, Compute rstd)
        : c1(sums.first * reciprocal_columns), shift(kLayerNorm ? sums.second * reciprocal_columns * rstd : Compute(0)),
          rstd(rstd) {}
    __device__ Compute dx(Compute g, Compute x_hat) const {
        const Compute projected = g - x_hat * c1;
        return kLayerNorm ? projected * rstd - shift : projected * rstd;
    }
};

// One thread's columns: `kVectors` vectors, `threads` vectors apart, so that a warp reads consecutive memory. Where the
// row ends early, a thread holds fewer, or none.
struct Columns {
    int first, step, count;

    __device__ Columns(int thread, int threads, int columns)
        : first(thread * kVector), step(threads * kVector), count(columns) {}
    __device__ int at(int vector) const { return first + vector * step; }
    __device__ bool holds(int vector) const { return at(vector) < count; }
    // The same, but single columns are found anew where it is used: kept over the rows, the places of all of a thread's
    // columns would fill its registers.
    __device__ Columns found_anew() const {
        Columns copy = *this;
        if constexpr (kVector == 1) asm volatile("" : "+r"(copy.first));
        return copy;
    }
    // A column that can be read in any case: work on it is wasted, but needs no branch.
    __device__ int readable(int vector) const { return holds(vector) ? at(vector) : 0; }
};

using Weights = Compute[kVectors][kVector];

// Where the thread holds no column, w is 0, so that nothing read there reaches a sum.
__device__ inline void load_weights(Weights& w, const BackwardArguments& a, const Columns& own, int first_column) {
    load_columns(w, a.w, a.w_code, Compute(1), [&](int k) { return own.holds(k) ? first_column + own.at(k) : -1; });
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) w[k][v] = own.holds(k) ? w[k][v] : Compute(0);
    }
}

// This thread's share of a row's sums, from one vector.
__device__ inline void add_to_sums(Sums<Compute>& sums, const Packed<X, kVector>& x_packed,
                                   const Packed<Dy, kVector>& dy_packed, const Compute (&w)[kVector],
                                   const RowStatistics& row) {
    Compute x[kVector], dy[kVector];
    x_packed.unpack(x);
    dy_packed.unpack(dy);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
        const Compute g = dy[v] * w[v];
        sums.first += g * row.x_hat(x[v]);
        if constexpr (kLayerNorm) sums.second += g;
    }
}

// The columns' sums over rows. Level one lies in registers, level two in shared memory, where the groups of a block are
// added together at the end: entry (column slot e, thread t) of `outer` is e·threads + t.
struct ColumnSums {
    Compute dw[kVectors][kVector], db[kWantDb ? kVectors : 1][kVector];
    Compute *outer_dw, *outer_db;
    int threads, rows_since_flush;

    static constexpr int kSums = kWantDb ? 2 : 1;
    __device__ static constexpr int shared_bytes(int threads) {
        return kSums * kColumnsPerThread * threads * int(sizeof(Compute));
    }

    __device__ ColumnSums(void* shared, int threads) : threads(threads), rows_since_flush(0) {
        outer_dw = static_cast<Compute*>(shared);
        outer_db = outer_dw + kColumnsPerThread * threads;
        if (int(threadIdx.x) < threads) {  // entries of its own, so no barrier; other threads have none
#pragma unroll
            for (int i = 0; i < kSums * kColumnsPerThread; ++i) outer_dw[i * threads + threadIdx.x] = Compute(0);
        }
        clear();
    }

    __device__ void clear() {
        rows_since_flush = 0;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
#pragma unroll
            for (int v = 0; v < kVector; ++v) {
                dw[k][v] = Compute(0);
                if constexpr (kWantDb) db[k][v] = Compute(0);
            }
        }
    }

    __device__ void add(int k, const Compute (&dy)[kVector], const Compute (&x_hat)[kVector]) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
            dw[k][v] += dy[v] * x_hat[v];
            if constexpr (kWantDb) db[k][v] += dy[v];
        }
    }

    __device__ void row_done() {
        if (++rows_since_flush == kRowsPerFlush) flush();
    }

    // Each thread adds into entries of its own: no barrier.
    __device__ void flush() {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
#pragma unroll
            for (int v = 0; v < kVector; ++v) {
                const int entry = (k * kVector + v) * threads + threadIdx.x;
                outer_dw[entry] += dw[k][v];
                if constexpr (kWantDb) outer_db[entry] += db[k][v];
            }
        }
        clear();
    }

    // After a flush and a block barrier: adds the groups and writes the block's partial row. The groups share the work:
    // runs of columns that fill 16 bytes, taken in turn.
    __device__ void write_partials(const BackwardArguments& a, int64 partial_row, int first_column, const Columns& own,
                                   int group_threads) const {
        const int groups = threads / group_threads, group = threadIdx.x / group_threads;
        const int64 row_start = partial_row * a.columns + first_column;
        for (int run = group; run < kColumnsPerThread / kRun; run += groups) {
            const int slot = run * kRun;
            const int column = own.at(slot / kVector) + slot % kVector;
            if (column >= own.count) break;
            const int entry = slot * threads + threadIdx.x % group_threads;
            if (a.dw_partials) write_run(a.dw_partials + row_start + column, outer_dw + entry, group_threads);
            if constexpr (kWantDb) {
                if (a.db_partials) write_run(a.db_partials + row_start + column, outer_db + entry, group_threads);
            }
        }
    }

private:
    static constexpr int kRun = minimum(kVector, 16 / sizeof(Compute));

    __device__ void write_run(Compute* target, const Compute* entries, int group_threads) const {
        double sums[kRun] = {};  // long sums of float32 would show in dw; these few additions cost nothing
        for (int first = 0; first < threads; first += group_threads) {
#pragma unroll
            for (int i = 0; i < kRun; ++i) sums[i] += double(entries[i * threads + first]);
        }
        Packed<Compute, kRun> packed;
        packed.pack(sums);
        packed.store(target);
    }
};

// The second half of a row's work, for one vector: dx, which is stored on request, and the columns' sums.
__device__ inline void finish_vector(ColumnSums& columns, int k, const Packed<X, kVector>& x_packed,
                                     const Packed<Dy, kVector>& dy_packed, const Compute (&w)[kVector],
                                     const RowStatistics& row, const RowCoefficients& coefficients, bool store,
                                     X* dx_target) {
    Compute x_hat[kVector], dy[kVector], dx[kVector];
    x_packed.unpack(x_hat);
    dy_packed.unpack(dy);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
        x_hat[v] = row.x_hat(x_hat[v]);
        dx[v] = coefficients.dx(dy[v] * w[v], x_hat[v]);
    }
    columns.add(k, dy, x_hat);
    if (store) {
        Packed<X, kVector> packed;
        packed.pack(dx);
        packed.store_streaming(dx_target);
    }
}
