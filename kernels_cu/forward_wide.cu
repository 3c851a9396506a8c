// Forward pass for rows so long that all blocks of the launch share each (wide.cuh): y, mean and rstd, from one reading of x.
//
// Blocks exchange what their parts of a row come to: RMSNorm the squares, LayerNorm those about the part's own mean, and the sum, which
// are put together as forward.cuh says. Who reads all blocks' sums also finds the root. A row's y reads x from the ring again.
//
// To memory: x and y once. Orders of sums: over a thread's columns, in chains, over a warp by a butterfly, over its warps likewise,
// then over the blocks, some in turn and the rest by a butterfly. Compile-time switches: those of forward.cuh and wide.cuh.
#include "forward.cuh"
constexpr bool kSpreadsEntries = !kLayerNorm;  // 1048576, 1 GB, 174.2 → 169.2 us, LayerNorm 174.1 → 197.2
#include "wide.cuh"

struct WideForwardArguments {
    const X* x;
    const void *w, *b;  // null: ones, zeros
    X* y;
    Compute *mean, *rstd;
    void* exchange;
    int64 rows;
    int64 x_row_stride, y_row_stride;  // in elements
    double eps;
    int columns, slab_columns;
    int steps;
    short w_code, b_code;  // ElementCode
    bool read_once;        // x need not stay in the L2 cache
    unsigned char lag;     // as in backward_wide.cu

    // Through the ring go x and, where rows are counted from one of three of their elements, the words that have these.
    static constexpr int kArrays = 1, kWords = kHasOrigin ? 3 : 0;
    __device__ const X* array(int) const { return x; }
    __device__ int64 stride(int) const { return x_row_stride; }
    __device__ int word(int i) const { return i == 0 ? 0 : i == 1 ? columns / 2 & -kVector : columns - kVector; }
    __device__ bool exchanged() const { return true; }
};
static_assert(sizeof(WideForwardArguments) == WIDE_ARGUMENT_BYTES, "the Python side packs the same struct");

// What a row is counted from (Origin of forward.cuh), by those words; the middle one's first element is the middle one, or near it.
__device__ inline float origin_of(const Vector* words) {
    if constexpr (!kHasOrigin) return 0.0f;
    float first[kVector], middle[kVector], last[kVector];
    words[0].unpack(first);
    words[1].unpack(middle);
    words[2].unpack(last);
    return Origin{first[0], middle[0], last[kVector - 1]}.value();
}

// Of a row's parts the squares, LayerNorm's of the distances from the part's own mean, and the sum, as RowMoments of forward_row.cuh
// puts warps' together; in the end mean, from the row's origin, and rstd.
struct PutTogether {
    const WideForwardArguments& a;
    const RootOfMean root;
    const float reciprocal_columns;

    __device__ explicit PutTogether(const WideForwardArguments& a) : a(a), root(a.eps), reciprocal_columns(1.0f / a.columns) {}

    template <int kCount, class PartOf, class ColumnsOf, class AddUp>
    __device__ Sums<float> put_together(PartOf part_of, int columns, ColumnsOf columns_of, AddUp add_up) const {
        float sum = 0.0f, mean = 0.0f, squares = 0.0f;
        if constexpr (kLayerNorm) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) sum += part_of(i).second;
            add_up(sum);
            mean = mean_of(sum, 1.0f / columns);
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const Sums<float> part = part_of(i);
            if constexpr (kLayerNorm) {
                const PartColumns own = columns_of(i);
                const float apart = fused(-own.columns, mean, part.second);  // its mean less the row's, times its columns
                squares += fused(apart * own.reciprocal, apart, part.first);
            } else {
                squares += part.first;
            }
        }
        add_up(squares);
        return {squares, sum};
    }
    __device__ Sums<float> total(const Sums<float>& sums, int64 row, const Vector* words) const {
        const float mean = kLayerNorm ? mean_of(sums.second, reciprocal_columns) : 0.0f;
        const float rstd = root.reciprocal(sums.first * reciprocal_columns);
        if (blockIdx.x == 0 && row < a.rows) {
            a.rstd[row] = rstd;
            if constexpr (kLayerNorm) a.mean[row] = origin_of(words) + mean;
        }
        return {mean, rstd};
    }
};
using Block = WideBlock<WideForwardArguments, PutTogether>;

struct Affine {
    Compute w[kVectors][kVector], b[kVectors][kVector];

    __device__ void load(const WideForwardArguments& a, int first_column, const WideColumns& own) {
        const auto column_of = [&](int i) { return loaded_column(own, i); };
        fill_columns(w, 1.0f);
        fill_columns(b, 0.0f);
        load_columns_ahead(as_loaded(b), column_address(a.b, a.b_code, first_column), a.b_code, column_of);
        load_columns_ahead(as_loaded(w), column_address(a.w, a.w_code, first_column), a.w_code, column_of);
    }
};

// What a thread has of a step's rows, counted from their origins; zeros where it has no column. Of rows that the last step lacks it is
// whatever lies there, and comes to nothing.
struct StepRows {
    float x[kRows][kVectors][kVector];

    __device__ StepRows(const Block& block, const WideColumns& own, int stage, int j, int group_row) {
        const float origins = origin_of(block.words_in_ring(stage, group_row + own.lane() % kRows));  // a lane has one
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const float origin = kHasOrigin ? __shfl_sync(0xffffffffu, origins, i) : 0.0f;
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
                const X* const source = block.in_ring(stage, 0, j, group_row + i, own.at(k));
                Vector packed = {};
                if (own.holds(k)) packed.load(source);
                packed.unpack(x[i][k]);
                count_from(origin, x[i][k], own.holds(k));
            }
        }
    }
};

// For each row a sum over a thread's columns, of term(i, k, v) of each, in several chains: one would wait for itself.
template <class Term> __device__ void sum_of_columns(const WideColumns& own, float (&sums)[kRows], Term term) {
    float chains[kRows][4] = {};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
        if (own.warp_lacks[k]) break;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int v = 0; v < kVector; ++v) chains[i][v % 4] += term(i, k, v);
        }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums[i] = chains[i][0] + chains[i][1] + (chains[i][2] + chains[i][3]);
}

// By the warps that work on rows.
struct Worker {
    const Block& block;
    const WideForwardArguments& a;
    const WideColumns own;
    const ThreadPart part;
    const float reciprocal_warp_columns;
    const int warp, lane, group_row;

    __device__ Worker(const Block& block, const WideColumns& own, int warp)
        : block(block), a(block.a), own(own), part([&](int k) { return own.holds(k); }),
          reciprocal_warp_columns(PartColumns(block.columns_of_warp(warp % kRowWarps)).reciprocal), warp(warp),
          lane(own.lane()), group_row(warp / kRowWarps * kRows) {}

    // Each warp's rows of step j: the squares, LayerNorm's about the warp's own mean, and the sum.
    __device__ void post_moments(int stage, int j) const {
        constexpr int kLanes = 32 / kRows;  // of these each first has a row's sums
        const StepRows rows(block, own, stage, j, group_row);
        float own_sums[kRows], numbers[kRows], sum = 0.0f;
        if constexpr (kLayerNorm) {
            sum_of_columns(own, own_sums, [&](int i, int k, int v) { return rows.x[i][k][v]; });
#pragma unroll
            for (int i = 0; i < kRows; ++i) numbers[i] = own_sums[i];
            sum = sum_numbers(numbers, lane);
            float means[kRows], centres[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                means[i] = mean_of(__shfl_sync(0xffffffffu, sum, i * kLanes), reciprocal_warp_columns);
                centres[i] = part.centre(own_sums[i], means[i]);
            }
            sum_of_columns(own, numbers, [&](int i, int k, int v) {
                const float distance = rows.x[i][k][v] - (own.holds(k) ? centres[i] : 0.0f);
                return distance * distance;
            });
#pragma unroll
            for (int i = 0; i < kRows; ++i) numbers[i] = part.about(means[i], centres[i], numbers[i], own_sums[i]);
        } else {
            sum_of_columns(own, numbers, [&](int i, int k, int v) { return rows.x[i][k][v] * rows.x[i][k][v]; });
        }
        const float squares = sum_numbers(numbers, lane);
        if (lane % kLanes == 0) block.posted(j, group_row + lane / kLanes, warp) = {squares, sum};
        block.post(j, lane);
    }
    // And their y.
    __device__ void write_rows(int stage, int j, X* y, const Affine& affine) const {
        StepRows rows(block, own, stage, j, group_row);
        block.wait_for_totals(j);
        const int count = block.rows_of(j, group_row);
        Sums<float> totals[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) totals[i] = block.total(j, group_row + i);
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            if (own.warp_lacks[k]) break;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const float mean = totals[i].first, rstd = totals[i].second;
                float(&x)[kVector] = rows.x[i][k];
#pragma unroll
                for (int v = 0; v < kVector; ++v) {
                    const float centred = kLayerNorm ? x[v] - mean : x[v];
                    x[v] = centred * rstd * affine.w[k][v] + affine.b[k][v];
                }
                Vector packed;
                packed.pack(x);
                if (own.holds(k) && i < count) packed.store(y + i * a.y_row_stride + own.at(k));
            }
        }
    }
    __device__ void work(const Affine& affine) const {
        X* y = a.y + int64(group_row) * a.y_row_stride + block.slab.first_column;
        Block::Place place;
        int old_stage = 0;
        for (int j = 0; j < a.steps + kBehind; ++j) {
            if (j < a.steps) {
                block.full[place.stage].wait(place.parity);
                post_moments(place.stage, j);
                place.advance();
            }
            const int past = j - kBehind;
            if (past < 0) continue;
            write_rows(old_stage, past, y, affine);
            y += kStepRows * a.y_row_stride;
            block.leave(old_stage, lane);
            if (++old_stage == kStages) old_stage = 0;
        }
    }
};

extern "C" __global__ void __launch_bounds__(kAllThreads, 1) forward_wide(const WideForwardArguments a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ WideState state;
    const Block block(a, state, shared);
    const WideColumns own(threadIdx.x, block.slab.columns);
    Affine affine;
    block.run([&] { affine.load(a, block.slab.first_column, own); },
              [&](int warp) { Worker(block, own, warp).work(affine); });
}
