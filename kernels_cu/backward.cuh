// What all backward kernels share: arguments, derived sizes, the arithmetic of a row, the column sums.
//
// With x̂ = (x − mean)·rstd (RMSNorm: mean = 0) and g = dy·w, for each row of `columns`:
//
//     c1 = mean(g·x̂)   c2 = mean(g) (RMSNorm: 0)   dx = (g − x̂·c1 − c2)·rstd   dw = Σ_rows dy·x̂   db = Σ_rows dy
//
// Compile-time switches:
//   LAYER_NORM  0: RMSNorm, 1: LayerNorm
//   X_TYPE      element type of x and dx          DY_TYPE  element type of dy
//   WANT_DB     1: db is summed as well           VECTOR   1: accesses of 16 bytes of the larger type (kWideVector;
//                                                          half, where these do not divide a thread's
//                                                          columns), 0: of NARROW_VECTOR elements, or for
//                                                          ODD_ROWS (element.cuh)
//   COLUMNS_PER_THREAD     PART_OF_WARP  the lanes of a row that takes a warp or less, however many
//                                                          columns a thread has; 0: columns.cuh
//   SHORT_ROWS  1: some block has fewer columns of a row than one of its warps would read
//   WEIGHT_OFFSET  1: w + offset in place of w    PER_HEAD  1: one w for each head
//   ADD_RESIDUAL   1: dresidual_out is added to dx  ACCUMULATE  1: dw and db are added to what is there
// Decided at run time, because it costs little: whether w has x's type or the arithmetic's (another is widened before, by
// widen_w.cu, but for ANY_W of backward_split.cu), the type of dw and db, and whether dx and dw are wanted (null pointers).
#pragma once

#include "element.cuh"
#include "reduce.cuh"
#include "reduction.cuh"

constexpr bool kLayerNorm = LAYER_NORM;
constexpr bool kWantDb = WANT_DB;

// Reserved, and 0 so far; a kernel that honours one takes it out of the assertion.
static_assert(!WEIGHT_OFFSET && !PER_HEAD && !ADD_RESIDUAL && !ACCUMULATE, "reserved switches");

using X = X_TYPE;
using Dy = DY_TYPE;

using Compute = typename ComputeOf<X>::type;

constexpr int kColumnsPerThread = COLUMNS_PER_THREAD;
// 16 bytes of the larger type (of dy no more than of the arithmetic's, for registers' sake): by two words of it, 32 bytes apart from
// lane to lane, each access would fill half of the sectors that it reaches, and of the ring's banks (x in float32, dy of 16 bits,
// RMSNorm, N=4096, 12 MB, 10.8 → 9.9 us).
constexpr int kDyBytes = minimum(sizeof(Dy), sizeof(Compute));
constexpr int kWideVector = VECTOR ? minimum(16 / int(sizeof(X)), 16 / kDyBytes) : NARROW_VECTOR;
constexpr int kVector = kOddRows ? 2 : kColumnsPerThread % kWideVector ? kWideVector / 2 : kWideVector;
constexpr int kVectors = kColumnsPerThread / kVector;
static_assert(kVectors * kVector == kColumnsPerThread, "the vectors cover a thread's columns exactly");

// In the arithmetic's type a vector is two words of 16 bytes: what lanes have side by side then lies 32 bytes apart.
constexpr bool kTwoWords = VECTOR && kVector * int(sizeof(Compute)) == 32;

#include "columns.cuh"

// A thread adds this many rows into registers before it adds the registers into the second level: two levels keep the
// error of long float32 sums at that of short ones. Relative to the sum, n terms cost about 2.5e-8·sqrt(n/2).
constexpr int kRowsPerFlush = 16;

struct BackwardArguments {
    const X* x;
    const Dy* dy;
    const void* w;          // null: ones
    const Compute* mean;    // LayerNorm
    const Compute* rstd;
    X* dx;                  // null: not wanted
    void *dw, *db;          // null: not wanted
    Compute* dw_partials;   // a row of partial_row_stride(columns) for each walker; null: dw is the only one, or none
    Compute* db_partials;
    void* sums;             // split route: Sums<Compute> of rows × slabs; gangs: what they exchange; column blocks: of their parts
    Meeting* meeting;       // null: nothing to reduce, or one walker whose partial row is dw, or narrowed to it. The counters alone:
                            // of column blocks' parts, if a slice has several; of pace, where no more than dx is wanted
    int64 rows;
    int64 x_row_stride, dy_row_stride, dx_row_stride;  // in elements
    int columns;
    int w_code;             // ElementCode, of w: x's type or the arithmetic's (widen_w.cu), with ANY_W any
    int group_threads;      // threads that share a row
    int slab_columns;       // columns of a row that one block holds
    int stages;             // staged route: steps in flight
    int steps;              // staged route: at least so many of each walk over the rows
    int partial_rows;       // as many as walkers
    int groups;             // of a block
    short dw_code;          // ElementCode, of dw and db
    short row_threads;      // threads that share a column, of a column block or in the final reduction; there a power of two
    // Staged route.
    short column_threads;   // of a column block, side by side
    short column_blocks;    // blocks behind those that walk rows, which sum dw and db; 0: the walkers do
    short row_parts;        // column blocks that share a slice's rows
    short lead;             // of Pace, in quarters of a step; 0: no pace is kept
    short step_counters;    // a power of two
    bool read_once;         // x and dy need not stay in the L2 cache
};
static_assert(sizeof(BackwardArguments) == ARGUMENT_BYTES, "the Python side packs the same struct");

using XVector = RowVector<X, kVector>;
using DyVector = RowVector<Dy, kVector>;

// The constants of one row.
struct RowStatistics {
    Compute mean, rstd;

    template <class Arguments> __device__ void load(const Arguments& a, int64 row) {
        rstd = a.rstd[row];
        if constexpr (kLayerNorm) mean = a.mean[row];
    }
    // Nothing waits for these before they are read, or moved.
    __device__ void load_in_place(const BackwardArguments& a, int64 row) {
        ::load_in_place(rstd, a.rstd + row);
        if constexpr (kLayerNorm) ::load_in_place(mean, a.mean + row);
    }
    __device__ RowStatistics moved() const { return {kLayerNorm ? ::moved(mean) : mean, ::moved(rstd)}; }
    __device__ Compute centred(Compute x) const { return kLayerNorm ? x - mean : x; }
};

// What a row's sums Σ dy·w·(x − mean) and Σ dy·w come down to:
//
//     dx = (dy·w − c2 − (x − mean)·slope)·rstd,  slope = c1·rstd
struct RowCoefficients {
    Compute slope, c2;

    __device__ RowCoefficients(const Sums<Compute>& sums, Compute reciprocal_columns, const RowStatistics& row)
        : slope(sums.first * reciprocal_columns * row.rstd * row.rstd), c2(sums.second * reciprocal_columns) {}
    __device__ Compute dx(Compute dy, Compute w, Compute x, const RowStatistics& row) const {
        const Compute g = kLayerNorm ? fused(dy, w, -c2) : dy * w;
        return fused(-row.centred(x), slope, g) * row.rstd;
    }
};

// w of a thread's columns.
template <int kCount = kVectors> struct Weights {
    Compute own[kCount][kVector];

    // Where the thread holds no column, w is 0, so that nothing read there reaches a sum.
    template <class At> __device__ void load(const void* first_column, int code, const At& at) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
#pragma unroll
            for (int v = 0; v < kVector; ++v) own[k][v] = Compute(holds_column(at, k, v));
        }
        load_columns_of_either<Compute, X>(as_loaded(own), first_column, code, [&](int i) { return loaded_column(at, i); });
    }
};

// Where a block's sums of its columns go in the end; null where they are not wanted.
struct PartialRow {
    Compute *dw, *db;

    __device__ PartialRow(const BackwardArguments& a, int64 row, int first_column) {
        const int64 start = row * partial_row_stride(a.columns) + first_column;
        dw = in(a.dw, a.dw_partials, start);
        db = kWantDb ? in(a.db, a.db_partials, start) : nullptr;
    }

private:
    __device__ static Compute* in(void* result, Compute* partials, int64 start) {
        return result ? (partials ? partials : static_cast<Compute*>(result)) + start : nullptr;
    }
};

// The columns' sums over rows. Level one lies in registers. Level two, where there are more rows, lies in shared
// memory, and there the groups of a block are added together at the end. There a thread's accumulators are laid out in
// runs of 16 bytes: run i of thread t is run i·threads + t of `outer`.
struct ColumnSums {
    using Level = Compute[kVectors][kVector];

    Level dw, db;
    Compute* outer;
    int thread, threads, shift, lanes, rows_since_flush;  // shift and lanes: of Columns
    bool flushed;

    static constexpr int kRun = 16 / int(sizeof(Compute));
    static constexpr int kRuns = kColumnsPerThread / kRun;
    using Run = Packed<Compute, kRun>;

    __device__ static constexpr int shared_bytes(int threads) {
        return (kWantDb ? 2 : 1) * kRuns * 16 * threads;
    }

    __device__ ColumnSums(void* shared, int thread, int threads, const Columns& own)
        : outer(static_cast<Compute*>(shared)), thread(thread), threads(threads), shift(own.shift), lanes(own.lanes),
          flushed(false) {
        clear();
    }

    // Once for each row.
    __device__ void add(int k, int v, Compute dw_term, Compute db_term) {
        dw[k][v] += dw_term;
        if constexpr (kWantDb) db[k][v] += db_term;
    }

    // Once for each row, and once more, or with the last row, with `complete`; of a block with several groups that brings the
    // sums into the second level.
    __device__ void row_done(int group_threads, bool complete = false) {
        if (++rows_since_flush < kRowsPerFlush && !complete) return;
        if (kShifts && group_threads != threads) {
            shift_back(dw);
            if constexpr (kWantDb) shift_back(db);
        }
        add_outer();
        if (complete && group_threads == threads) return;
        store_outer();
        flushed = true;
        clear();
    }

    // The sums of all rows of the block, which are complete, written to its partial row; to be called by all of its
    // `threads`. The threads of several groups meet at a barrier.
    __device__ void write_partials(const PartialRow& target, const Columns& own, int group_threads) {
        if (group_threads == threads) {
            write_own_columns(target, own);
        } else {
            barrier_over(threads);
#pragma unroll 1  // the second time its instructions are there
            for (int output = 0; output < (kWantDb ? 2 : 1); ++output) {
                Compute* const sums = output ? target.db : target.dw;
                if (sums) write_groups(sums, output ? outer_db() : outer, own.in_order(), group_threads);
            }
        }
    }

private:
    __device__ Compute* outer_db() const { return outer + kColumnsPerThread * threads; }

    __device__ void clear() {
        rows_since_flush = 0;
        fill_columns(dw, Compute(0));
        fill_columns(db, Compute(0));
    }

    // To the order of the columns, in which groups can be added up: the second of a pair is the first of the next pair, which the
    // next lane has, or the first lane in its next pair.
    __device__ void shift_back(Level& level) const {
        const bool last = (thread & (lanes - 1)) == lanes - 1;
        Compute next = __shfl_sync(0xffffffffu, level[0][0], thread + 1, lanes);
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            const Compute own = next;
            next = k + 1 < kVectors ? __shfl_sync(0xffffffffu, level[(k + 1) % kVectors][0], thread + 1, lanes) : Compute(0);
            const Compute second = last ? next : own;
            level[k][0] = moved(shift ? level[k][1] : level[k][0]);  // one by one: else registers run out
            level[k][1] = moved(shift ? second : level[k][1]);
        }
    }

    // To the columns of a block that is one group.
    __device__ void write_own_columns(const PartialRow& target, const Columns& own) {
        if (target.dw) write_own(target.dw, dw, own);
        if (target.db) write_own(target.db, db, own);
    }

    // Each thread has runs of its own: no barrier.
    __device__ void store_outer() const {
        store_runs(outer, dw);
        if constexpr (kWantDb) store_runs(outer_db(), db);
    }

    __device__ void add_outer() {
        if (!flushed) return;
        add_runs(dw, outer);
        if constexpr (kWantDb) add_runs(db, outer_db());
    }

    // A few runs at a time: enough to wait for memory together, not so many that registers run out.
    __device__ void add_runs(Level& level, const Compute* runs) const {
        constexpr int kTogether = kRuns % 4 == 0 ? 4 : kRuns % 2 == 0 ? 2 : kRuns % 3 == 0 ? 3 : kRuns;
        static_assert(kRuns % kTogether == 0, "no run is left over");
#pragma unroll
        for (int first = 0; first < kRuns; first += kTogether) {
            Compute before[kTogether][kRun];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                Run run;
                run.load(runs + ((first + i) * threads + thread) * kRun);
                run.unpack(before[i]);
            }
#pragma unroll
            for (int j = 0; j < kTogether * kRun; ++j) {
                const int e = first * kRun + j;
                level[e / kVector][e % kVector] += before[j / kRun][j % kRun];
            }
            asm volatile("" ::: "memory");
        }
    }

    __device__ void store_runs(Compute* runs, const Level& level) const {
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
            Compute values[kRun];
#pragma unroll
            for (int j = 0; j < kRun; ++j) values[j] = level[(i * kRun + j) / kVector][(i * kRun + j) % kVector];
            Run run;
            run.pack(values);
            run.store(runs + (i * threads + thread) * kRun);
        }
    }

    // With kTwoWords lanes write their vectors in pairs, first the even lane's, then the odd one's, of each one word. Were each to write
    // its own, every store would fill half of the sectors that it reaches, of 32 bytes, and take as long as for whole ones (LayerNorm,
    // 65536, 50 MB, 26.6 → 24.8 us, 100 MB 39.4 → 37.8).
    __device__ static void write_in_pairs(Compute* target, const Level& level, const Columns& own) {
        const bool odd = threadIdx.x & 1;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            Compute words[2][kRun];
#pragma unroll
            for (int v = 0; v < kRun; ++v) {
                const Compute first = level[k][v], second = level[k][kVector - kRun + v];
                const Compute other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
                words[0][v] = odd ? other : first;
                words[1][v] = odd ? second : other;
            }
#pragma unroll
            for (int lane = 0; lane < 2; ++lane) {
                const int column = own.at(k) + (lane - odd) * kVector;
                Run run;
                run.pack(words[lane]);
                if (column < own.end) run.store(target + column + (odd ? kRun : 0));
            }
        }
    }

    static constexpr int kWidth = minimum(kVector, kRun);  // columns that follow one another in memory

    __device__ static void write_own(Compute* target, const Level& level, const Columns& own) {
        if constexpr (kTwoWords) {
            write_in_pairs(target, level, own);
        } else {
#pragma unroll
            for (int e = 0; e < kColumnsPerThread; e += kWidth) {
                const int k = e / kVector, v = e % kVector;
                if constexpr (kOddRows) {
                    for (int j = 0; j < kVector; ++j) {
                        if (holds_column(own, k, j)) target[own.at(k) + j] = level[k][j];
                    }
                    continue;
                }
                if (!own.holds(k)) continue;
                Compute values[kWidth];
#pragma unroll
                for (int j = 0; j < kWidth; ++j) values[j] = level[k][v + j];
                Packed<Compute, kWidth> packed;
                packed.pack(values);
                packed.store(target + own.at(k) + v);
            }
        }
    }

    // Whether a warp of several groups adds up a run together: RMSNorm, N=128, 25 MB, 17.3 → 16.2 us, at 1 GB 246.3 → 247.4,
    // LayerNorm 20.4 → 17.9, 257.6 → 255.1. With 24 columns that lost: LayerNorm, N=384, 25 MB, 18.0 → 18.6.
    static constexpr bool kSharesRuns = !kWholeWarps && !PART_OF_WARP;

    // The groups, of a power of two of threads, share the work: runs, taken in turn. With kSharesRuns and several warps these
    // take them: each group of a warp adds up a part of the run's sums, and a butterfly the parts.
    __device__ void write_groups(Compute* target, const Compute* runs, const Columns& own, int group_threads) const {
        const int team_threads = kSharesRuns && group_threads < 32 && threads > 32 ? 32 : group_threads;
        const int teams = threads >> log2_of(team_threads), team = thread >> log2_of(team_threads);
        const int own_thread = thread & (group_threads - 1);
        const int part = kSharesRuns ? (thread & (team_threads - 1)) - own_thread : 0;  // the first thread of its first group
        for (int i = team; i < kRuns; i += teams) {
            double sums[kRun] = {};  // long sums of float32 would show in dw; these few additions cost nothing
            for (int first = part; first < threads; first += team_threads) {
                Run run;
                double values[kRun];
                run.load(runs + (i * threads + first + own_thread) * kRun);
                run.unpack(values);
#pragma unroll
                for (int j = 0; j < kRun; ++j) sums[j] += values[j];
            }
            for (int distance = group_threads; kSharesRuns && distance < team_threads; distance *= 2) {
#pragma unroll
                for (int j = 0; j < kRun; ++j) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], distance);
            }
            if (kSharesRuns && part) continue;
            if constexpr (kVector >= kRun) {
                const int k = i * kRun / kVector;
                Run run;
                run.pack(sums);
                if (own.holds(k)) run.store(target + own.at(k) + i * kRun % kVector);
            } else {
#pragma unroll
                for (int j = 0; j < kRun; ++j) {
                    const int k = (i * kRun + j) / kVector, v = j % kVector;
                    if (holds_column(own, k, v)) target[own.at(k) + v] = Compute(sums[j]);
                }
            }
        }
    }
};

// When the column sums are complete: the block's part of partial row `row`, for all to see.
__device__ inline Attendance publish_columns(const BackwardArguments& a, ColumnSums& sums, int64 row, int first_column,
                                             const Columns& own, int group_threads) {
    Attendance attendance;
    if (a.meeting) attendance.look(*a.meeting);
    if (a.dw || a.db) sums.write_partials(PartialRow(a, row, first_column), own, group_threads);
    if (a.meeting) attendance.arrive(*a.meeting);
    return attendance;
}

// Whether each vector has sums of its own, added to the row's in turn: so a thread may have a single vector, as in
// backward_few_rows.cu, and the row's sums the same bits. Not where LayerNorm's loop, of 16-bit types, is nearly as slow as memory
// (N=3072, 1 GB, in turn 243.2 → 241.6 us, 7168 242.9 → 240.3, on an H200; float32 takes as long), nor where registers run out, nor
// where several blocks share a row, for which few rows have no kernel.
constexpr bool kFillsTime = kLayerNorm && kWholeWarps && sizeof(X) == 2 && (kColumnsPerThread == 24 || kColumnsPerThread == 28);
constexpr bool kSumsByVector = VECTOR && kColumnsPerThread <= 32 && !kFillsTime && CLUSTER == 1 && !GANG;

// The first half of a row's work, for one vector: its share of the row's sums and of the columns' sums. Both take the
// product dy·(x − mean), which saves an operation; beyond the range of float32 it is no number, or 0, even where dy·x̂ would be one
// (x of 1e-20 and dy of 1e-18, say; "Accuracy" in README.md).
// `row_sums` is the vector's chain, of an odd row both.
template <bool kRowSums, bool kColumnSums, int kCount>
__device__ void first_half(Sums<Compute>* row_sums, ColumnSums* column_sums, int k, const XVector& x_packed,
                           const DyVector& dy_packed, const Weights<kCount>& weights, const RowStatistics& row) {
    Compute x[kVector], dy[kVector];
    const Compute(&w)[kVector] = weights.own[k];
    x_packed.unpack(x);
    dy_packed.unpack(dy);
    Sums<Compute> of_vector = {Compute(0), Compute(0)};
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
        Sums<Compute>& sums = kSumsByVector ? of_vector : row_sums[kOddRows ? v : 0];
        const Compute product = dy[v] * row.centred(x[v]);
        if constexpr (kRowSums) {
            sums.first = fused(product, w[v], sums.first);
            if constexpr (kLayerNorm) sums.second = fused(dy[v], w[v], sums.second);
        }
        if constexpr (kColumnSums) column_sums->add(k, v, product * row.rstd, dy[v]);
    }
    if constexpr (kRowSums && kSumsByVector) row_sums->add(of_vector);
}

// The second half, for one vector: dx.
template <int kCount>
__device__ XVector second_half(int k, const XVector& x_packed, const DyVector& dy_packed,
                            const Weights<kCount>& weights, const RowStatistics& row, const RowCoefficients& coefficients) {
    Compute x[kVector], dy[kVector];
    const Compute(&w)[kVector] = weights.own[k];
    x_packed.unpack(x);
    dy_packed.unpack(dy);
#pragma unroll
    for (int v = 0; v < kVector; ++v) x[v] = coefficients.dx(dy[v], w[v], x[v], row);
    XVector packed;
    packed.pack(x);
    return packed;
}
