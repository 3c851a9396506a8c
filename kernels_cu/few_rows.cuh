// dx of few rows, past the ring, beside column blocks or alone.
//
// Expects backward.cuh and staged.cuh.
#pragma once

// Whether few rows, of which no group has more than one, go from memory to registers and back, past the ring: by so little code
// that less of it is waited for. An H100, 1x4096 6.5 → 6.1 us, LayerNorm 6.8 → 6.3, 64x1024 6.8 → 6.3, 7.3 → 6.4. It takes
// up to a tenth longer to compile. With 40 columns a thread and in clusters it gained nothing.
constexpr bool kTakesFewRows = kVector > 1 && kColumnsPerThread <= 32 && !kSplitsRows;

// Of the arguments, what few rows need.
struct FewRowsArguments {
    const X* x;
    const Dy* dy;
    const void* w;
    const Compute *mean, *rstd;
    X* dx;
    int64 rows, x_row_stride, dy_row_stride, dx_row_stride;
    int columns, w_code, group_threads, slab_columns, groups;

    __device__ explicit FewRowsArguments(const BackwardArguments& a)
        : x(a.x), dy(a.dy), w(a.w), mean(a.mean), rstd(a.rstd), dx(a.dx), rows(a.rows), x_row_stride(a.x_row_stride),
          dy_row_stride(a.dy_row_stride), dx_row_stride(a.dx_row_stride), columns(a.columns), w_code(a.w_code),
          group_threads(a.group_threads), slab_columns(a.slab_columns), groups(a.groups) {}
};

// dx of the block's rows, one for each group. Not in line: what the walk begins with follows the kernel's first instructions. All
// of a row's vectors from one address, and those that are not there afterwards: 60 instructions before the first load, not 120 (an
// H100, 1x128 5.35 → 5.25 us, LayerNorm 5.4 → 5.2).
__device__ __noinline__ void write_few_rows(FewRowsArguments a, BlockState* state) {
    if constexpr (kWholeWarps) a.group_threads = a.group_threads < 32 ? 32 : a.group_threads;  // never: so nothing is divided
    const BlockShare share(a, BlockColumns(a));
    const unsigned number = blockIdx.x * share.groups + share.group;
    const bool active = number < a.rows;
    const Columns own(share.thread, a.group_threads, share.columns);
    const X* x_row = a.x + number * a.x_row_stride + own.first;
    const Dy* dy_row = a.dy + number * a.dy_row_stride + own.first;
    asm volatile("" : "+l"(x_row), "+l"(dy_row));  // found here, once
    XVector x[kVectors] = {};
    DyVector dy[kVectors] = {};
    RowStatistics row = {};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
        if (!active || !own.holds(k)) continue;
        x[k].load_streaming(x_row + k * own.step());
        dy[k].load_streaming(dy_row + k * own.step());
    }
    if (active) row.load(a, number);
    Weights w;
    w.load(a.w, a.w_code, own);
    // Where the thread has no column, it reads what it reads in the ring, so that an Inf there shows, too.
    if (!own.holds(kVectors - 1) && active && share.team_columns) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (own.holds(k)) continue;
            x[k].load(x_row + share.team_column - own.first);
            dy[k].load(dy_row + share.team_column - own.first);
        }
    }
    const Compute reciprocal_columns = Compute(1) / Compute(a.columns);

    Sums<Compute> sums = {Compute(0), Compute(0)};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) first_half<true, false>(sums, nullptr, k, x[k], dy[k], w, row);
    sums = SumExchange<kLayerNorm>(*state, share, a.group_threads).at_once(sums, share.thread);
    const RowCoefficients coefficients(sums, reciprocal_columns, row);
    X* const dx = a.dx + number * a.dx_row_stride;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
        second_half(dx + own.at(k), active && own.holds(k), k, x[k], dy[k], w, row, coefficients);
    }
}
