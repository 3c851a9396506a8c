// Backward pass for rows so long that all blocks of the launch share each (wide.cuh): as each block has the same columns of all rows,
// dw and db are complete where they are summed: no partial rows go through memory, and nobody adds them up.
//
// A thread has its share of w, and, in two levels, the second compensated, of dw and db. A row's second half, dx, reads x and dy from
// the ring again.
//
// To memory: x, dy and dx once, dw and db once. Orders of sums: a row over a thread's columns, over a warp by a butterfly, over its
// warps likewise, then over the blocks, some in turn and the rest by a butterfly; a column over 16 rows, over these in turn, over the
// block's groups.
//
// Compile-time switches, beside those of backward.cuh and wide.cuh:
//   DX_ALONE             1: no sums of columns
//   WIDE_SHARED_TOTALS   1: the second level of these lies in shared memory, behind the ring
#include "backward.cuh"
constexpr bool kSpreadsEntries = true;
#include "wide.cuh"

#ifndef DX_ALONE
#define DX_ALONE 0
#endif
#ifndef WIDE_SHARED_TOTALS
#define WIDE_SHARED_TOTALS 0
#endif
constexpr bool kSumsColumns = !DX_ALONE;

static_assert(sizeof(X) == sizeof(Dy), "x and dy of one type");
static_assert(kRowsPerFlush % kRows == 0, "sums of rows are added up between two steps");
constexpr int kStepsPerFlush = kRowsPerFlush / kRows;

struct WideArguments {
    const X* x;
    const Dy* dy;
    const void* w;  // null: ones
    const Compute* mean;  // LayerNorm
    const Compute* rstd;
    X* dx;          // null: not wanted
    void *dw, *db;  // null: not wanted
    void* exchange;
    int64 rows;
    int64 x_row_stride, dy_row_stride, dx_row_stride;  // in elements
    int columns, slab_columns;
    int steps;
    Compute reciprocal_columns;
    short w_code, dw_code;  // ElementCode
    bool aligned_sums;      // dw and db begin at multiples of 16 bytes
    bool read_once;         // x and dy need not stay in the L2 cache
    // Steps that a block posts itself before it reads all blocks' sums of one, fewer than kBehind: by then these are mostly there,
    // and reading them again and again slows down who stores them.
    unsigned char lag;

    static constexpr int kArrays = 2, kWords = 0;  // that go through the ring
    __device__ const X* array(int i) const { return i ? reinterpret_cast<const X*>(dy) : x; }
    __device__ int64 stride(int i) const { return i ? dy_row_stride : x_row_stride; }
    __device__ int word(int) const { return 0; }
    __device__ bool exchanged() const { return dx != nullptr; }
};
static_assert(sizeof(WideArguments) == WIDE_ARGUMENT_BYTES, "the Python side packs the same struct");

// A row's sums are those of its parts, added up.
struct AddedUp {
    __device__ explicit AddedUp(const WideArguments&) {}

    template <int kCount, class PartOf, class ColumnsOf, class AddUp>
    __device__ Sums<float> put_together(PartOf part_of, int, ColumnsOf, AddUp add_up) const {
        Sums<float> sums = part_of(0);
#pragma unroll
        for (int i = 1; i < kCount; ++i) sums.add(part_of(i));
        add_up(sums.first);
        if constexpr (kLayerNorm) add_up(sums.second);
        return sums;
    }
    __device__ Sums<float> total(const Sums<float>& sums, int64, const void*) const { return sums; }
};
using Block = WideBlock<WideArguments, AddedUp>;

// Sums of a vector's columns, and what additions to these have lost.
struct VectorTotals {
    float sum[kVector], lost[kVector];

    __device__ void add(const float (&rows)[kVector]) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) {  // TwoSum
            const float total = sum[v] + rows[v], part = total - sum[v];
            lost[v] += (sum[v] - (total - part)) + (rows[v] - part);
            sum[v] = total;
        }
    }
};

// Those of a thread's columns: in registers, or where these are too few, in shared memory.
template <bool kShared> struct Totals {
    VectorTotals own[kVectors] = {};

    __device__ Totals(float*, const WideColumns&) {}
    __device__ bool has(int) const { return true; }
    __device__ VectorTotals get(int k) const { return own[k]; }
    __device__ void put(int k, const VectorTotals& totals) { own[k] = totals; }
    __device__ static int floats(int) { return 0; }
};
// In shared memory eight threads' vectors lie together: 128 bytes have each thread's first four sums, 128 its next, and so on, then
// likewise what these have lost. So accesses of 16 bytes by eight threads meet each bank once.
template <> struct Totals<true> {
    static constexpr int kPieces = kVector / 4, kApart = 8 * 4, kLost = kPieces * kApart;
    static_assert(8 * kVector * int(sizeof(X)) == 128, "all blocks but the last have whole vectors of eight threads");
    float* const memory;
    const WideColumns& own;

    __device__ Totals(float* memory, const WideColumns& own) : memory(memory), own(own) {}
    __device__ bool has(int k) const { return own.holds(k); }
    __device__ VectorTotals get(int k) const {
        VectorTotals totals;
        const float* const sums = pieces(k);
        load(sums, totals.sum);
        load(sums + kLost, totals.lost);
        return totals;
    }
    __device__ void put(int k, const VectorTotals& totals) {
        float* const sums = pieces(k);
        store(sums, totals.sum);
        store(sums + kLost, totals.lost);
    }
    // Of so many columns, rounded up to those of eight threads.
    __device__ static int floats(int columns) { return (columns + 8 * kVector - 1) / (8 * kVector) * (2 * kLost); }

private:
    using Piece = Packed<float, 4>;
    using Values = float[kVector];

    __device__ static void load(const float* source, Values& values) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            Piece piece;
            piece.load(source + i * kApart);
            piece.unpack(reinterpret_cast<float(&)[4]>(values[4 * i]));
        }
    }
    __device__ static void store(float* target, const Values& values) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            Piece piece;
            piece.pack(reinterpret_cast<const float(&)[4]>(values[4 * i]));
            piece.store(target + i * kApart);
        }
    }
    __device__ float* pieces(int k) const {
        int vector = own.at(k) / kVector;
        asm volatile("" : "+r"(vector));  // found anew each time, for this takes no register meanwhile
        return memory + vector / 8 * (2 * kLost) + vector % 8 * 4;
    }
};
using ColumnTotals = Totals<WIDE_SHARED_TOTALS>;
static_assert(!WIDE_SHARED_TOTALS || kGroups == 1, "groups would share them");

// A thread's sums of its columns over rows: those of kStepsPerFlush steps, then added up to totals. Of a launch without more steps `rows`
// are all, and totals, which nobody has written, are not read.
struct WideColumnSums {
    Compute rows[kVectors][kVector];
    ColumnTotals totals;

    __device__ WideColumnSums(float* memory, const WideColumns& own) : totals(memory, own) { fill_columns(rows, 0.0f); }
    __device__ void flush(bool first) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (!totals.has(k)) continue;
            VectorTotals sums = {};
            if (!first) sums = totals.get(k);
            sums.add(rows[k]);
            totals.put(k, sums);
        }
        fill_columns(rows, 0.0f);
    }
    // Makes `rows` the sums over all, when the last have been added up.
    __device__ void take_totals() {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (!totals.has(k)) continue;
            const VectorTotals sums = totals.get(k);
#pragma unroll
            for (int v = 0; v < kVector; ++v) {
                const float left = sums.lost[v];
                rows[k][v] = left == left ? sums.sum[v] + left : sums.sum[v];  // which may be infinite
            }
        }
    }
};

// The statistics of a warp's rows: a batch of steps at a time, of which lane i has row i % kRows of step i / kRows.
struct StatisticsAhead {
    static constexpr int kSteps = 32 / kRows;
    static_assert(kBehind <= kSteps, "of two batches one has it");
    const WideArguments& a;
    const int group_row;
    RowStatistics before, batch, next;

    __device__ StatisticsAhead(const WideArguments& a, int group_row)
        : a(a), group_row(group_row), before{0.0f, 0.0f}, batch{0.0f, 0.0f} {
        load_next(0);
    }
    // Once for each step in turn.
    __device__ void advance(int j) {
        if (j % kSteps != 0) return;
        before = batch;
        batch = next.moved();
        load_next(j + kSteps);
    }
    // Of row i of the step j − behind.
    __device__ RowStatistics of(int j, int behind, int i) const {
        const bool earlier = j % kSteps < behind;
        const int lane = unsigned(j - behind) % kSteps * kRows + i;
        RowStatistics row;
        row.rstd = __shfl_sync(0xffffffffu, earlier ? before.rstd : batch.rstd, lane);
        row.mean = kLayerNorm ? __shfl_sync(0xffffffffu, earlier ? before.mean : batch.mean, lane) : 0.0f;
        return row;
    }

private:
    // Of the batch that begins with step j.
    __device__ void load_next(int j) {
        const int64 row = int64(j + int(threadIdx.x) % 32 / kRows) * kStepRows + group_row + threadIdx.x % kRows;
        next = {0.0f, 0.0f};
        if (row >= a.rows) return;
        ::load_in_place(next.rstd, a.rstd + row);
        if constexpr (kLayerNorm) ::load_in_place(next.mean, a.mean + row);
    }
};

// What a thread has of a step's rows; anything where it has no column, or there is no row.
struct StepRows {
    XVector x[kRows][kVectors];
    DyVector dy[kRows][kVectors];

    // Rows from group_row of the step on.
    __device__ StepRows(const Block& block, const WideColumns& own, int stage, int j, int group_row) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                x[i][k].load(block.in_ring(stage, 0, j, group_row + i, own.readable(k)));
                dy[i][k].load(reinterpret_cast<const Dy*>(block.in_ring(stage, 1, j, group_row + i, own.readable(k))));
            }
        }
    }
};

// In the last step there may be fewer rows. Of those that are missing, to which no copy comes, a thread's columns are to be zeros where
// their sums are taken; else they come to nothing, whatever they are. So do they with threads that have no column, which read there, too.
__device__ inline void clear_missing_rows(const Block& block, const WideColumns& own, int stage, int j, int group_row) {
    if (!kSumsColumns || kStepRows == 1) return;
    const int rows = block.rows_of(j, group_row);
#pragma unroll 1
    for (int i = kRows - 1; i >= 0 && i >= rows; --i) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (!own.holds(k)) continue;
            XVector{}.store(block.in_ring(stage, 0, j, group_row + i, own.at(k)));
            XVector{}.store(block.in_ring(stage, 1, j, group_row + i, own.at(k)));
        }
    }
}

// dw or db, of all threads that work on rows; `scratch` has room for a float32 for each of their columns.
__device__ inline void write_sums(const Block& block, const WideColumnSums& sums, void* target, int group, const WideColumns& own,
                                  float* scratch) {
    const WideArguments& a = block.a;
    if (!target) return;
    if (kGroups == 1 && a.aligned_sums && (a.dw_code == kFloat32 || a.dw_code == kCodeOf<X>)) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (!own.holds(k)) continue;
            const int column = block.slab.first_column + own.at(k);
            if (a.dw_code == kFloat32) {
                Packed<float, kVector> packed;
                packed.pack(sums.rows[k]);
                packed.store(static_cast<float*>(target) + column);
            } else {
                XVector packed;
                packed.pack(sums.rows[k]);
                packed.store(static_cast<X*>(target) + column);
            }
        }
        return;
    }
    constexpr int kGroupColumns = kThreads / kGroups * kColumnsPerThread;
    barrier_over(kThreads);  // nobody reads any more what lies in `scratch`
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
        Packed<float, kVector> packed;
        packed.pack(sums.rows[k]);
        if (own.holds(k)) packed.store(scratch + group * kGroupColumns + own.at(k));
    }
    barrier_over(kThreads);
#pragma unroll 1
    for (int column = threadIdx.x; column < block.slab.columns; column += kThreads) {
        double sum = scratch[column];
#pragma unroll
        for (int i = 1; i < kGroups; ++i) sum += scratch[i * kGroupColumns + column];
        store_element(target, a.dw_code, block.slab.first_column + column, sum);
    }
}

// By the warps that work on rows.
__device__ inline void work(const Block& block, const Weights<>& w, const WideColumns& own, int warp) {
    const WideArguments& a = block.a;
    const int lane = own.lane(), group = warp / kRowWarps, group_row = group * kRows, steps = a.steps;
    StatisticsAhead statistics(a, group_row);
    float* const totals = reinterpret_cast<float*>(block.place(kStages));  // behind the ring
    WideColumnSums dw(totals, own), db(totals + ColumnTotals::floats(own.columns), own);
    Block::Place place;
    int old_stage = 0;
    X* dx = a.dx + int64(group_row) * a.dx_row_stride + block.slab.first_column;

    for (int j = 0; j < steps + kBehind; ++j) {
        if (kSumsColumns && steps > kStepsPerFlush && j > 0 && (j == steps || j < steps && j % kStepsPerFlush == 0)) {
            dw.flush(j == kStepsPerFlush);
            if constexpr (kWantDb) db.flush(j == kStepsPerFlush);
        }
        statistics.advance(j);
        if (j < steps) {
            RowStatistics rows[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) rows[i] = statistics.of(j, 0, i);
            // Where rows begin at whole lines, in any step a thread's columns have the same place, and it alone is to be done with it.
            if (!OFF_LINES) clear_missing_rows(block, own, place.stage, j, group_row);
            block.full[place.stage].wait(place.parity);
            if (OFF_LINES) clear_missing_rows(block, own, place.stage, j, group_row);
            const StepRows now(block, own, place.stage, j, group_row);
            constexpr int kSums = kLayerNorm ? 2 : 1;
            float numbers[kRows * kSums] = {};
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                if (own.warp_lacks[k]) break;
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    float x[kVector], dy[kVector];
                    now.x[i][k].unpack(x);
                    now.dy[i][k].unpack(dy);
#pragma unroll
                    for (int v = 0; v < kVector; ++v) {
                        const float product = dy[v] * rows[i].centred(x[v]);
                        float& first = numbers[i * kSums];
                        first = fused(product, w.own[k][v], first);
                        if constexpr (kLayerNorm) {
                            float& second = numbers[i * kSums + 1];
                            second = fused(dy[v], w.own[k][v], second);
                        }
                        if constexpr (kSumsColumns) dw.rows[k][v] += product * rows[i].rstd;
                        if constexpr (kSumsColumns && kWantDb) db.rows[k][v] += dy[v];
                    }
                }
            }
            if (a.dx) {
                constexpr int kLanes = 32 / (kRows * kSums);
                const float sum = sum_numbers(numbers, lane);
                const int number = lane / kLanes;
                Sums<float>& target = block.posted(j, group_row + number / kSums, warp);
                if (lane % kLanes == 0) (number % kSums ? target.second : target.first) = sum;
                block.post(j, lane);
            }
            place.advance();
        } else if (kSumsColumns && j == steps) {
            if (steps > kStepsPerFlush) {
                dw.take_totals();
                if constexpr (kWantDb) db.take_totals();
            }
            float* const scratch = reinterpret_cast<float*>(block.place(place.stage));
            write_sums(block, dw, a.dw, group, own, scratch);
            if constexpr (kWantDb) write_sums(block, db, a.db, group, own, scratch);
        }
        const int past = j - kBehind;
        if (past < 0) continue;
        if (a.dx) {
            const StepRows old(block, own, old_stage, past, group_row);
            block.wait_for_totals(past);
            const int rows = block.rows_of(past, group_row);
            RowStatistics of_row[kRows];
            Sums<float> sums[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                of_row[i] = statistics.of(j, kBehind, i);
                sums[i] = block.total(past, group_row + i);
            }
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                if (own.warp_lacks[k]) break;
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    const RowCoefficients coefficients(sums[i], a.reciprocal_columns, of_row[i]);
                    const XVector packed = second_half(k, old.x[i][k], old.dy[i][k], w, of_row[i], coefficients);
                    if (own.holds(k) && i < rows) packed.store_streaming(dx + i * a.dx_row_stride + own.at(k));
                }
            }
            dx += kStepRows * a.dx_row_stride;
        }
        block.leave(old_stage, lane);
        if (++old_stage == kStages) old_stage = 0;
    }
}

extern "C" __global__ void __launch_bounds__(kAllThreads, 1) backward_wide(const WideArguments a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ WideState state;
    const Block block(a, state, shared);
    unsigned thread = threadIdx.x;
    // Else the compiler asks for threadIdx.x in each step, and the answer takes long: LayerNorm, 278536 without db, 1 GB, 304.7 → 301.5 us.
    // (The forward pass takes longer so, LayerNorm in bfloat16, 262144, 67 MB of x and y 24.9 → 25.7.)
    asm volatile("" : "+r"(thread));
    const WideColumns own(thread, block.slab.columns);
    Weights<> w;
    block.run([&] { w.load(column_address(a.w, a.w_code, block.slab.first_column), a.w_code, own); },
              [&](int warp) { work(block, w, own, warp); });
}
