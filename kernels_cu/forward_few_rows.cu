// Forward pass for few rows: memory → registers → memory, all rows at the same time.
//
// Such a call takes the sum of its latencies, so x, w and b are asked for together, and no more is waited for but the sums of a row.
// (With x of float64, and if they are neither float32 nor of x's 16-bit type, w and b are waited for, one after the other.) A block
// has one row, or several rows of a warp or less. A thread holds the columns that one of forward_staged.cu holds, and a row's y has
// the same bits.
#include "forward_row.cuh"

static_assert(kVector > 1 && !kSplitsRows, "rows in vectors, each of one block");

// Threads on a multiprocessor that leave each the registers that it needs, for w, b, x and some: as config/few_rows.py has it.
constexpr int kBytesOfThread = kColumnsPerThread * int(2 * sizeof(Compute) + sizeof(X));
constexpr int kThreadsAtOnce = kBytesOfThread <= 240 ? 512 : kBytesOfThread <= 320 ? 384 : kMaxThreads;

// The exchange of a row's sums between the warps of a block, which has one such row.
struct BlockExchange : GroupSums<false> {
    using GroupSums<false>::GroupSums;

    // Posts what all lanes of the warp hold alike.
    __device__ void post_warp(const Sums<Compute>& sums) const {
        if (entries > 1 && threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = sums;
    }
    // By all threads of the block.
    __device__ const Sums<Compute>* wait(int) const {
        __syncthreads();
        return slots;
    }
};

extern "C" __global__ void __launch_bounds__(kThreadsAtOnce, 1) forward_few_rows(const ForwardArguments a) {
    __shared__ Sums<Compute> of_warps[kMaxWarps];
    const int group = kWholeWarps ? 0 : threadIdx.x >> log2_of(a.group_threads);
    const int groups = kWholeWarps ? 1 : blockDim.x >> log2_of(a.group_threads);
    const int thread = threadIdx.x - group * a.group_threads;
    const int row = blockIdx.x * groups + group;
    const bool active = row < a.rows;
    const Columns own(thread, a.group_threads, a.columns);

    Kept x[kVectors];
    const X* const x_row = a.x + row * a.x_row_stride;
    Origin asked = {};
    if (active) asked.load(x_row, a.columns);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) x[k].load(x_row + own.at(k), active && own.holds(k));
    Compute w[kVectors][kVector], b[kVectors][kVector];
    fill_columns(w, Compute(1));
    fill_columns(b, Compute(0));
    const auto own_column = [&](int k) { return own.holds(k) ? own.at(k) : -1; };
    const bool w_is_packed = load_columns_packed<X>(w, a.w, a.w_code, own_column);
    const bool b_is_packed = load_columns_packed<X>(b, a.b, a.b_code, own_column);

    const BlockExchange exchange(of_warps, a.group_threads);
    const RowMoments<BlockExchange> moments(a, own, exchange);
    const Compute origin = asked.value();
#pragma unroll
    for (int k = 0; k < kVectors; ++k) x[k].less(origin, own.holds(k));
    const Sums<Compute> posted = moments.of_warp(x, own, PairsHeld(own));
    exchange.post_warp(posted);
    if (w_is_packed) unpack_columns<X>(w);
    if (b_is_packed) unpack_columns<X>(b);
    const RowStatistics statistics = moments.of_row(0, posted);

    X* const y_row = a.y + row * a.y_row_stride;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
        const Vector packed = normalized(x[k], statistics, w[k], b[k]);
        if (active && own.holds(k)) packed.store(y_row + own.at(k));
    }
    if (active && thread == 0) {
        a.rstd[row] = statistics.rstd;
        if constexpr (kLayerNorm) a.mean[row] = origin + statistics.mean;
    }
}
