// Backward pass for rows that fit in the registers of one block: memory → registers → memory.
//
// A group of `group_threads` threads (a power of two up to 32, or several warps, which then are the whole block) holds
// one row, 16 columns a thread (8 in float64; in a warp or less also as many as the staged route); a block of several groups
// holds several rows. Blocks walk rows with the grid's stride. In registers: this thread's x and dy between their two uses,
// its w, its dw and db. In shared memory: the second level of dw and db, and the warps' sums of a row. To memory: x, dy and
// dx once; one partial row of dw and db for each block. Orders of sums: a row over its lanes by a butterfly, then over its
// warps likewise; a column over 16 rows, over these in turn, over the block's groups. The next row is on its way while one
// is at work, where the registers hold two.
#include "backward.cuh"

// Compile-time switch: MAX_THREADS, 256, or for longer rows 512, off 16 bytes 384: what leaves a thread the registers
// that it needs.
constexpr int kMaxThreads = MAX_THREADS;

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1) backward_direct(const BackwardArguments a) {
    extern __shared__ uint4 shared[];
    __shared__ GroupSum<Compute, kMaxThreads == 256 ? 8 : 16> group_sum;

    if (a.meeting) a.meeting->start();
    const int groups = a.groups;
    const int group = threadIdx.x / a.group_threads;
    const Columns own(threadIdx.x % a.group_threads, a.group_threads, a.columns);
    const PairsHeld held(own);
    ColumnSums column_sums(shared, threadIdx.x, blockDim.x, own);
    Weights<> w;
    w.load(a.w, a.w_code, own);

    const Compute reciprocal_columns = Compute(1) / Compute(a.columns);
    struct Row {
        XVector x[kVectors];
        DyVector dy[kVectors];
        RowStatistics statistics;
    };
    const auto load = [&](Row& to, int64 row) {
        if (row >= a.rows) return;  // the last block may have more groups than rows
        const Columns at = own.found_anew();
        const X* const x = a.x + row * a.x_row_stride;
        const Dy* const dy = a.dy + row * a.dy_row_stride;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            const Held own_of = held.of(k, at.holds(k));
            load_held(to.x[k], x + at.at(k), own_of);
            load_held(to.dy[k], dy + at.at(k), own_of);
        }
        to.statistics.load(a, row);
    };

    // Two rows fit in the registers of many threads only as 16-bit vectors; of 256 threads not with float64 dy beside
    // float32 arithmetic, nor with single columns of two types.
    constexpr bool kShortVectors = kVector > 1 && sizeof(X) == 2 && sizeof(Dy) == 2;
    constexpr bool kLoadAhead = kMaxThreads > 256
                                    ? kShortVectors
                                    : sizeof(Dy) <= sizeof(Compute) && (kVector > 1 || sizeof(X) == sizeof(Dy));
    int buffer = 0;
    const int64 step = int64(gridDim.x) * groups;
    Row current = {}, next = {};
    load(current, int64(blockIdx.x) * groups + group);
    for (int64 first_row = int64(blockIdx.x) * groups; first_row < a.rows; first_row += step) {
        const int64 row = first_row + group;
        if constexpr (kLoadAhead) load(next, row + step);
        Sums<Compute> chains[kChains] = {};
        if (row < a.rows) {
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                first_half<true, true>(chains, &column_sums, k, current.x[k], current.dy[k], w,
                                       current.statistics);
            }
        }
        Sums<Compute> sums = sum_chains<kLayerNorm>(chains, own);
        if (a.dx) {
            group_sum.all<kLayerNorm>(sums, a.group_threads, buffer);
            const RowCoefficients coefficients(sums, reciprocal_columns, current.statistics);
            const Columns at = own.found_anew();
            X* const dx = a.dx + row * a.dx_row_stride;
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                const Held store = row < a.rows ? held.of(k, at.holds(k)) : Held(0);
                const XVector packed = second_half(k, current.x[k], current.dy[k], w, current.statistics, coefficients);
                store_held<true>(packed, dx + at.at(k), store);
            }
        }
        if (row < a.rows) column_sums.row_done(a.group_threads);
        if constexpr (kLoadAhead) current = next;
        else load(current, row + step);
    }

    column_sums.row_done(a.group_threads, true);
    const Attendance attendance = publish_columns(a, column_sums, blockIdx.x, 0, own, a.group_threads);
    constexpr bool kHasRegisters = kMaxThreads == 256;
    reduce_partials<kHasRegisters ? kReductionBatch : 8, kHasRegisters ? 8 : 2, Compute>(a, attendance, shared, 0, a.columns);
}
