// Backward pass for few rows: memory → registers → memory, a thread for each vector of a row.
//
// Such a call takes the sum of its latencies, so a thread has little to do between them: it has one vector of a row, or
// VECTORS_A_THREAD where a row has more of them than a block has threads. The first blocks write dx, each of one row, or of
// several rows of a warp or less. The blocks behind them sum dw and db (column_blocks.cuh), or write those of a single row.
//
// A row's dx has the bits of backward_staged.cu, where a thread has COLUMNS_PER_THREAD columns. Where each of its vectors has sums of
// its own (kSumsByVector), these, which several threads have here, go through shared memory and are added up in that kernel's
// order. Else a thread has all of its vectors here, too ("whole threads"); and where there are more rows than find room with
// fewer vectors a thread (kHasBoth).
//
// Compile-time switch, beside those of backward.cuh: VECTORS_A_THREAD, 1, 2, 4, or all.
#include "backward.cuh"
#include "column_blocks.cuh"
#include "staged.cuh"

constexpr int kOwn = VECTORS_A_THREAD;
static_assert(kSumsByVector || (kOwn == kVectors && kWholeWarps), "a thread holds what one of backward_staged.cu holds");
static_assert(!kSumsByVector || kOwn == 1 || kOwn == 2 || kOwn == 4, "vectors of a thread that has some of these");
constexpr bool kHasBoth = kSumsByVector && kWholeWarps && sizeof(X) == 2 && sizeof(Dy) == 2;
constexpr int kMostThreads = 512;
constexpr int kSumVectors = 128;  // of a single row, whose dw and db one block writes
constexpr int kWarpsOfRow = kMaxWarps;  // that share a row in backward_staged.cu, at most

// A line of constants that is not there yet is waited for, so what the blocks that write dx need lies in two: the first six
// addresses, which share one with what the launch has, and the 64 bytes behind these.
struct FewRowsArguments {
    const X* x;
    const Dy* dy;
    const void* w;          // null: ones
    const Compute* mean;    // LayerNorm
    const Compute* rstd;
    X* dx;
    void *dw, *db;          // null: not wanted
    int64 x_row_stride, dy_row_stride, dx_row_stride;  // in elements
    unsigned rows, columns;
    unsigned row_blocks;        // the first, that write dx
    unsigned short block_rows;  // of each of these, up to 256
    unsigned char log2_lanes;   // lanes that share a row in backward_staged.cu,
    unsigned char warps;        // and warps
    Compute reciprocal_columns;
    bool whole_threads;         // kHasBoth
    unsigned char w_code;       // ElementCode: x's type or the arithmetic's (widen_w.cu)
    unsigned short dw_code;     // ElementCode, of dw and db
    unsigned short column_threads, row_threads;  // of the blocks behind; 0: these have a single row's dw and db
    unsigned short column_blocks;                // how many these are

    static constexpr int row_parts = 1;
    static constexpr void* sums = nullptr;
};
static_assert(sizeof(FewRowsArguments) == FEW_ROWS_ARGUMENT_BYTES, "the Python side packs the same struct");

// A thread's vectors: those of its row that are as many apart as the row has threads, or with kWholeThreads a warp has.
template <bool kWholeThreads> struct OwnVectors {
    unsigned row;
    int first, step;  // in columns
    int columns;
    bool active;  // it has a row

    __device__ explicit OwnVectors(const FewRowsArguments& a) : columns(a.columns) {
        unsigned vector = threadIdx.x, row_of_block = 0, threads = blockDim.x;
        if constexpr (!kWholeWarps) {
            threads = kVectors << a.log2_lanes;
            row_of_block = (threadIdx.x >> a.log2_lanes) / kVectors;
            vector -= row_of_block * threads;
        }
        row = blockIdx.x * a.block_rows + row_of_block;
        active = row < a.rows && row_of_block < a.block_rows;
        first = vector * kVector;
        step = threads * kVector;
        if constexpr (kWholeThreads) {
            const Columns held(threadIdx.x, a.warps * 32, a.columns);
            active = threadIdx.x < a.warps * 32u;
            first = held.first;
            step = held.step();
        }
    }
    __device__ int at(int i) const { return first + i * step; }
    __device__ bool holds(int i) const { return active && at(i) < columns; }
    // Where it has no column it reads what an idle thread of backward_staged.cu reads, so that an Inf there shows here, too: the
    // first column of its team. There may be none.
    __device__ int read_from(int i) const { return at(i) < columns ? at(i) : first_of_team(i); }
    __device__ bool reads(int i) const { return active && first_of_team(i) < columns; }

private:
    __device__ int first_of_team(int i) const {
        constexpr int kTeamColumns = kTeamThreads * kColumnsPerThread;
        if constexpr (!kWholeWarps) return 0;
        return kWholeThreads ? threadIdx.x / kTeamThreads * kTeamColumns : at(i) / kTeamColumns * kTeamColumns;
    }
};

// Adds up the sums of a row's vectors: those of one thread of backward_staged.cu, in turn, for which `all` has room where it is not
// one here, then those of its warp's lanes, then its warps. By all threads of the block.
template <bool kWholeThreads, int kOwnSums>
__device__ Sums<Compute> sum_row(Sums<Compute>* all, const Sums<Compute> (&own)[kOwnSums], const FewRowsArguments& a) {
    __shared__ Sums<Compute> of_warps[kWarpsOfRow];
    const int lanes = kWholeWarps ? 32 : lanes_of(1 << a.log2_lanes), log2_lanes = log2_of(lanes), warps = kWholeWarps ? a.warps : 1;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & (lanes - 1);
    if constexpr (!kWholeWarps && kOwnSums == 1 && kVectors == 2) {
        if (lanes < 32) {  // the two vectors lie `lanes` lanes apart: a step more of the butterfly
            Sums<Compute> sums = own[0];
            sum_over_lanes<kLayerNorm>(sums, 2 * lanes);
            return sums;
        }
    }
    if constexpr (!kWholeThreads) {
#pragma unroll
        for (int i = 0; i < kOwnSums; ++i) all[threadIdx.x + i * blockDim.x] = own[i];
        __syncthreads();
    }
    Sums<Compute> sums = own[0];
    if (warps == 1 || warp < warps) {  // a single warp's by all warps, each for itself
        if constexpr (!kWholeThreads) {
            const int group = kWholeWarps ? (warps == 1 ? 0 : warp) : (threadIdx.x >> log2_lanes) / kVectors;
            const int first = group * kVectors * lanes;
            sums = all[first + lane];
#pragma unroll
            for (int k = 1; k < kVectors; ++k) sums.add(all[first + k * lanes + lane]);
        }
        sum_over_lanes<kLayerNorm>(sums, lanes);
    }
    if (warps == 1) return sums;
    if (lane == 0 && warp < warps) of_warps[warp] = sums;
    __syncthreads();
    return sum_entries<kLayerNorm, kWarpsOfRow>(of_warps, warps);
}

// A vector of a single row's dw or db, of x's type or the arithmetic's, at a multiple of 16 bytes.
__device__ inline void store_sums(void* target, int code, int column, const Compute (&values)[kVector]) {
    if (code == kCodeOf<Compute>) {
        Packed<Compute, kVector> packed;
        packed.pack(values);
        packed.store(static_cast<Compute*>(target) + column);
    } else {
        XVector packed;
        packed.pack(values);
        packed.store(static_cast<X*>(target) + column);
    }
}

// dw and db of a single row: kSumVectors of its vectors by each block.
__device__ inline void write_sums(const FewRowsArguments& a, int block) {
    const int column = (block * kSumVectors + int(threadIdx.x)) * kVector;
    if (threadIdx.x >= kSumVectors || column >= a.columns) return;
    XVector x_packed;
    DyVector dy_packed;
    RowStatistics row;
    Compute x[kVector], dy[kVector], dw[kVector] = {}, db[kVector] = {};
    x_packed.load(a.x + column);
    dy_packed.load(a.dy + column);
    row.load(a, 0);
    x_packed.unpack(x);
    dy_packed.unpack(dy);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {  // added to zero, as elsewhere: -0 becomes +0
        dw[v] += dy[v] * row.centred(x[v]) * row.rstd;
        db[v] += dy[v];
    }
    if (a.dw) store_sums(a.dw, a.dw_code, column, dw);
    if (kWantDb && a.db) store_sums(a.db, a.dw_code, column, db);
}

template <bool kWholeThreads> __device__ void write_rows(const FewRowsArguments& a, Sums<Compute>* all) {
    constexpr int kHeld = kWholeThreads ? kVectors : kOwn;
    const OwnVectors<kWholeThreads> own(a);
    XVector x[kHeld] = {};
    DyVector dy[kHeld] = {};
    Weights<kHeld> w;
    RowStatistics row = {};
    const X* const x_row = a.x + int64(own.row) * a.x_row_stride;
    const Dy* const dy_row = a.dy + int64(own.row) * a.dy_row_stride;
    const auto load = [&](int i) {
        x[i].load_streaming(x_row + own.read_from(i));
        dy[i].load_streaming(dy_row + own.read_from(i));
    };
    // Asked for together, not by a branch for each vector: an H200, LayerNorm, 1x7168, 6.2 → 5.6 us.
    if (kWholeThreads && own.reads(0)) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) load(i);
    }
#pragma unroll
    for (int i = 0; !kWholeThreads && i < kHeld; ++i) {
        if (own.reads(i)) load(i);
    }
    if (own.active) row.load(a, own.row);
    w.load(a.w, a.w_code, own);

    Sums<Compute> sums[kWholeThreads ? 1 : kHeld] = {};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        first_half<true, false>(&sums[kWholeThreads ? 0 : i], nullptr, i, x[i], dy[i], w, row);
    }
    const RowCoefficients coefficients(sum_row<kWholeThreads>(all, sums, a), a.reciprocal_columns, row);
    X* const dx = a.dx + int64(own.row) * a.dx_row_stride;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        const XVector packed = second_half(i, x[i], dy[i], w, row, coefficients);
        if (own.holds(i)) packed.store_streaming(dx + own.at(i));
    }
}

// With 40 columns a thread has no room in 128 registers.
constexpr int kBlockThreads = kColumnsPerThread > 32 ? kMaxThreads : kMostThreads;

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1) backward_few_rows(const FewRowsArguments a) {
    extern __shared__ __align__(16) char shared[];
    if (blockIdx.x >= a.row_blocks) {
        if (a.column_threads) {
            const ColumnArguments columns(a, blockIdx.x - a.row_blocks);
            // Out of line what the rows' blocks run lies together (an H100: 1% less on average); LayerNorm would spill a register.
            if constexpr (kLayerNorm) ColumnSlices<kMostThreads>(columns).sum(reinterpret_cast<Compute*>(shared));
            else sum_columns<kMostThreads>(columns, reinterpret_cast<Compute*>(shared));
        } else {
            write_sums(a, blockIdx.x - a.row_blocks);
        }
        return;
    }
    Sums<Compute>* const sums = reinterpret_cast<Sums<Compute>*>(shared);
    if constexpr (kHasBoth) {
        if (a.whole_threads) return write_rows<true>(a, sums);
    }
    write_rows<!kSumsByVector>(a, sums);
}
