// Backward pass for rows so long that all blocks of the launch share each: one block on a multiprocessor, with the same columns of
// all rows. So dw and db are complete where they are summed: no partial rows go through memory, and nobody adds them up.
//
// Rows come in steps of kStepRows, through a ring in shared memory that bulk copies fill. A thread has one vector of kRows rows of
// each step, its share of w, and, in two levels, the second compensated, of dw and db. Once a step blocks exchange their rows'
// sums, through memory, which here is the L2 cache; a row's second half, dx, comes kBehind steps after its first, and reads x and dy
// from the ring again. As every block waits for every other one's sums, all keep the same pace, and all must run at the same time:
// the launch is a cooperative one.
//
// Who works on rows waits for nobody's answer: beside these warps, one fills the ring, one adds up what they have posted and stores
// it for the other blocks, and kReaders read what all blocks have stored, and add that up. Where the first did the others' work,
// too, by turns, each waited for the L2 cache (25 MB, N=262144, two H200s, RMSNorm 17.1 → 15.4 us, LayerNorm 19.2 → 18.4).
//
// Nothing orders stores and reads but the sums themselves: their last bit says in which lap of the entries they were stored. At
// first entries are zero, which is nobody's sum in the first lap. A launch leaves them as they are, and makes those zero that the next
// one will use: there are two regions. A block stores the sums of step j + kLaps when it has those of all blocks of the step four
// before, which each of them stored when it had those of step j: nobody waits for these any more. Who waits for step j + kLaps has
// read, in the same place, those of step j, and so finds nothing older, whose last bit is the same.
//
// To memory: x, dy and dx once, dw and db once. Orders of sums: a row over a thread's columns, over a warp by a butterfly, over its
// warps likewise, then over the blocks, some in turn and the rest by a butterfly; a column over 16 rows, over these in turn, over the
// block's groups.
//
// Compile-time switches, beside those of backward.cuh (COLUMNS_PER_THREAD is one vector):
//   ROW_WARPS  warps of a block that share a row     OFF_LINES  1: rows do not all begin at whole lines of memory (staged.cuh)
//   DX_ALONE   1: no sums of columns
//   WIDE_…     as config/wide.py has them: warps that work on rows and rows of each, stages, steps behind, warps that read sums, laps
//              of entries, blocks at most, bytes of a region and of the arguments
#include "backward.cuh"
#include "pipeline.cuh"
#include "slab.cuh"

#ifndef OFF_LINES
#define OFF_LINES 0
#endif
#ifndef DX_ALONE
#define DX_ALONE 0
#endif
constexpr bool kSumsColumns = !DX_ALONE;

static_assert(kVectors == 1 && VECTOR && sizeof(X) == sizeof(Dy) && sizeof(Compute) == 4, "a vector of a row, and float sums");
constexpr int kWarps = WIDE_WARPS, kThreads = 32 * kWarps;  // that work on rows
constexpr int kRowWarps = ROW_WARPS, kGroups = kWarps / kRowWarps;
constexpr int kRows = WIDE_ROWS, kStepRows = kGroups * kRows;
static_assert(kStepRows <= 32 && kWarps * kRows <= 32, "a lane for each row, and for each warp's part of one");
static_assert(kRowsPerFlush % kRows == 0, "sums of rows are added up between two steps");

// Steps of the ring, and from a row's first half to its second: one is at work, three wait for their sums, two are on their way.
constexpr int kStages = WIDE_STAGES, kBehind = WIDE_BEHIND;
static_assert(kStages > kBehind + 1, "rows that wait leave room for others");
// Warps that read, in turn, each all blocks' sums of a step, and for so many of these: a multiprocessor's block, and its rows.
constexpr int kReaders = WIDE_READERS, kMostBlocks = WIDE_MOST_BLOCKS, kReads = (kStepRows * kMostBlocks + 31) / 32;
constexpr int kAllThreads = kThreads + 64 + 32 * kReaders;

// A warp that posts sums j has collected those of step j − kBehind − 1, which all blocks then had stored.
constexpr int kSlots = 8, kLaps = WIDE_LAPS;  // of sums in a block, and of entries in memory: powers of two
static_assert(kSlots >= kBehind + 2 && kLaps >= 2 * kBehind + 2, "nobody still reads what is overwritten");
static_assert((kLaps & (kLaps - 1)) == 0, "steps are counted without end");
static_assert(kLaps % kReaders == 0, "a lane reads a place in each lap, and so never misses one whose last bit would be the same");

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
};
static_assert(sizeof(WideArguments) == WIDE_ARGUMENT_BYTES, "the Python side packs the same struct");

// What blocks exchange, zero before the first launch that uses it; launches that do follow one another.
constexpr int kRegionBytes = kLaps * 2 * 4 * kMostBlocks * 8;  // of two groups' rows, and of LayerNorm's sums
static_assert(kRegionBytes == WIDE_REGION_BYTES, "the Python side makes room for it");
struct alignas(128) WideMemory {
    unsigned launches;
    alignas(128) char regions[2][kRegionBytes];
};

struct WideState {
    Barrier::State full[kStages], done[kStages];    // a step of the ring has arrived; all warps are done with it
    Barrier::State summed[kSlots], there[kSlots];   // all warps have posted a step's sums; readers have those of all blocks
    Sums<float> warps[kSlots][kStepRows * kRowWarps];
    Sums<float> totals[kSlots][kStepRows];
    unsigned launches;
};

// An entry: a row's sums in one block, the second for LayerNorm alone, each with its lap's parity, 1 in the first, for its last bit.
// That is no part of the sum, which so has a bit less, the same in any lap, and is infinite if it was.
struct Entry {
    unsigned first, second;

    __device__ static unsigned parity(int j) { return ~(unsigned(j) / kLaps) & 1; }
    Entry() = default;
    __device__ Entry(const Sums<float>& sums, int j)
        : first((__float_as_uint(sums.first) & ~1u) | parity(j)), second((__float_as_uint(sums.second) & ~1u) | parity(j)) {}
    __device__ bool is_of(int j) const { return ((first ^ parity(j)) & 1) == 0 && (!kLayerNorm || ((second ^ parity(j)) & 1) == 0); }
    // So that it is none of step j.
    __device__ void forget(int j) { first = second = ~parity(j); }
    __device__ Sums<float> sums() const { return {__uint_as_float(first & ~1u), __uint_as_float(second & ~1u)}; }
    __device__ void load(const char* source) {
        if constexpr (kLayerNorm) {
            asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "l"(source) : "memory");
        } else {
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(first) : "l"(source) : "memory");
        }
    }
    __device__ void store(char* target) const {
        if constexpr (kLayerNorm) {
            asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(first), "r"(second) : "memory");
        } else {
            asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(target), "r"(first) : "memory");
        }
    }
};
constexpr int kEntryBytes = kLayerNorm ? 8 : 4;

// The entries of a launch: for each of kLaps steps those of each block, of each row of a step.
struct Entries {
    char* region;
    int count;  // of a step

    __device__ char* at(int j, int number) const { return region + (unsigned(j) % kLaps * count + number) * kEntryBytes; }
};

// Adds up, over the lanes of a warp, each of kCount numbers (a power of two), of which lane i then has number i / (32 / kCount): half of
// the lanes go on with half of the numbers.
template <int kCount> __device__ float sum_numbers(float (&numbers)[kCount]) {
    int distance = 16;
#pragma unroll
    for (int half = kCount / 2; half > 0; half /= 2) {
        const bool upper = threadIdx.x & distance;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float own = upper ? numbers[half + i] : numbers[i], other = upper ? numbers[i] : numbers[half + i];
            numbers[i] = own + __shfl_xor_sync(0xffffffffu, other, distance);
        }
        distance /= 2;
    }
    float sum = numbers[0];
#pragma unroll
    for (int rest = 16 / kCount; rest > 0; rest /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, rest);
    return sum;
}

// A thread's sums of its columns over rows: in registers, so many rows at a time, then added up with what each addition loses.
struct WideColumnSums {
    float rows[kVector], sum[kVector], lost[kVector];

    __device__ WideColumnSums() {
#pragma unroll
        for (int v = 0; v < kVector; ++v) rows[v] = sum[v] = lost[v] = 0.0f;
    }
    __device__ void flush() {
#pragma unroll
        for (int v = 0; v < kVector; ++v) {  // TwoSum
            const float total = sum[v] + rows[v], part = total - sum[v];
            lost[v] += (sum[v] - (total - part)) + (rows[v] - part);
            sum[v] = total;
            rows[v] = 0.0f;
        }
    }
    __device__ void get(float (&values)[kVector]) const {
#pragma unroll
        for (int v = 0; v < kVector; ++v) values[v] = lost[v] == lost[v] ? sum[v] + lost[v] : sum[v];  // which may be infinite
    }
};

// The statistics of a group's rows: a batch of steps at a time, of which lane i has row i % kRows of step i / kRows.
struct WideStatistics {
    static constexpr int kSteps = 32 / kRows;
    RowStatistics before, batch, next;

    __device__ void load_next(const WideArguments& a, int64 first_row, int j) {
        const int64 row = first_row + int64(j + int(threadIdx.x) % 32 / kRows) * kStepRows + threadIdx.x % kRows;
        next = {0.0f, 0.0f};
        if (row >= a.rows) return;
        ::load_in_place(next.rstd, a.rstd + row);
        if constexpr (kLayerNorm) ::load_in_place(next.mean, a.mean + row);
    }
    // Once for each step in turn.
    __device__ void advance(const WideArguments& a, int64 first_row, int j) {
        if (j % kSteps != 0) return;
        before = batch;
        batch = next.moved();
        load_next(a, first_row, j + kSteps);
    }
    // Row i of the step j − behind.
    __device__ RowStatistics of(int j, int behind, int i) const {
        const bool earlier = j % kSteps < behind;
        const int lane = unsigned(j - behind) % kSteps * kRows + i;
        RowStatistics row;
        row.rstd = __shfl_sync(0xffffffffu, earlier ? before.rstd : batch.rstd, lane);
        row.mean = kLayerNorm ? __shfl_sync(0xffffffffu, earlier ? before.mean : batch.mean, lane) : 0.0f;
        return row;
    }
};

struct WideBlock {
    const WideArguments& a;
    WideState& state;
    char* const ring;
    const Slab slab;
    Barrier full, done, summed, there;

    __device__ WideBlock(const WideArguments& a, WideState& state, char* ring)
        : a(a), state(state), ring(ring), slab(a), full{shared_address(state.full)}, done{shared_address(state.done)},
          summed{shared_address(state.summed)}, there{shared_address(state.there)} {}

    // In elements, from one row of a step to the next in the ring, where with OFF_LINES each is as far from a line's start as in
    // memory; and what a place has of x, or of dy.
    __device__ int pitch() const { return a.slab_columns + (OFF_LINES ? 128 / int(sizeof(X)) : 0); }
    __device__ int part_elements() const { return kStepRows * pitch(); }
    __device__ static int lead(const X* base, int64 stride, int64 row) {
        const unsigned address = unsigned(reinterpret_cast<unsigned long long>(base)) + unsigned(row * stride) * unsigned(sizeof(X));
        return OFF_LINES ? address % 128 / sizeof(X) : 0;  // slabs are of whole lines
    }
    __device__ int place_bytes() const { return 2 * part_elements() * int(sizeof(X)); }
    __device__ static int slot(int j) { return unsigned(j) % kSlots; }
    __device__ static int parity(int j) { return unsigned(j) / kSlots & 1; }
    __device__ WideMemory& memory() const { return *static_cast<WideMemory*>(a.exchange); }
    __device__ Entries entries() const {
        return {memory().regions[state.launches & 1], kStepRows * int(gridDim.x)};
    }

    // By one thread.
    __device__ void make_barriers() const {
        for (int i = 0; i < kStages; ++i) {
            full[i].init(1);
            done[i].init(kWarps);
        }
        for (int i = 0; i < kSlots; ++i) {
            summed[i].init(kWarps);
            there[i].init(1);
        }
        fence_barrier_init();
    }
    __device__ void fill(int stage, int j, unsigned long long policy) const {
        const int64 first_row = int64(j) * kStepRows;
        const int rows = j + 1 < a.steps ? kStepRows : int(a.rows - first_row);
        const int bytes = slab.columns * int(sizeof(X));
        const X* x = a.x + first_row * a.x_row_stride + slab.first_column;
        const Dy* dy = a.dy + first_row * a.dy_row_stride + slab.first_column;
        SharedAddress place = shared_address(ring) + stage * place_bytes();
        full[stage].arrive_expecting(2 * rows * bytes);
#pragma unroll 1
        for (int row = 0; row < rows; ++row) {
            const int x_lead = lead(a.x, a.x_row_stride, first_row + row), dy_lead = lead(a.dy, a.dy_row_stride, first_row + row);
            bulk_copy(place + x_lead * sizeof(X), x, bytes, full[stage], policy);
            bulk_copy(place + (part_elements() + dy_lead) * sizeof(X), dy, bytes, full[stage], policy);
            x += a.x_row_stride;
            dy += a.dy_row_stride;
            place += pitch() * sizeof(X);
        }
    }
    // By one thread, which has filled the first places.
    __device__ void keep_filling(unsigned long long policy) const {
        RingPlace place;
#pragma unroll 1
        for (int j = kStages; j < a.steps; ++j) {
            done[place.stage].wait(place.parity);
            fill(place.stage, j, policy);
            place.advance();
        }
    }
    // By one warp: the block's sums, as all its warps have posted them.
    __device__ void send(int lane) const {
        const Entries entries = this->entries();
        const bool first_lane = lane % kRowWarps == 0 && lane < kStepRows * kRowWarps;
        const int number = blockIdx.x * kStepRows + lane / kRowWarps;
#pragma unroll 1
        for (int j = 0; j < a.steps; ++j) {
            summed[slot(j)].wait(parity(j));
            Sums<float> sums = state.warps[slot(j)][minimum(lane, kStepRows * kRowWarps - 1)];
            sum_over_lanes<kLayerNorm, kRowWarps>(sums);
            if (first_lane) Entry(sums, j).store(entries.at(j, number));
        }
    }
    // By each of kReaders warps, which take turns: all blocks' sums of a step. A lane has entries of one row.
    __device__ void read(int reader, int lane) const {
        const Entries entries = this->entries();
        clear_other_region(reader, lane);
        const auto number = [&](int i) { return i * 32 + lane; };
#pragma unroll 1
        for (int j = reader; j < a.steps; j += kReaders) {
            const int later = minimum(j + a.lag, a.steps - 1);
            summed[slot(later)].wait(parity(later));
            Entry read[kReads];
#pragma unroll
            for (int i = 0; i < kReads; ++i) read[i].forget(j);
            bool all = false;
            while (!all) {
                all = true;
#pragma unroll
                for (int i = 0; i < kReads; ++i) {
                    if (!read[i].is_of(j)) read[i].load(entries.at(j, minimum(number(i), entries.count - 1)));
                }
#pragma unroll
                for (int i = 0; i < kReads; ++i) all &= read[i].is_of(j);
                all = __all_sync(0xffffffffu, all);
            }
            Sums<float> sums = {0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < kReads; ++i) {
                if (number(i) < entries.count) sums.add(read[i].sums());
            }
#pragma unroll
            for (int distance = 16; distance >= kStepRows; distance /= 2) {
                sums.first += __shfl_xor_sync(0xffffffffu, sums.first, distance);
                if constexpr (kLayerNorm) sums.second += __shfl_xor_sync(0xffffffffu, sums.second, distance);
            }
            if (lane < kStepRows) state.totals[slot(j)][lane] = sums;
            __syncwarp();
            if (lane == 0) there[slot(j)].arrive();
        }
    }

    struct RingPlace {
        int stage = 0, parity = 0;
        __device__ void advance() {
            if (++stage == kStages) {
                stage = 0;
                parity ^= 1;
            }
        }
    };

private:
    __device__ void clear_other_region(int reader, int lane) const {
        uint4* const other = reinterpret_cast<uint4*>(memory().regions[~state.launches & 1]);
        for (int i = (blockIdx.x * kReaders + reader) * 32 + lane; i < kRegionBytes / 16; i += gridDim.x * kReaders * 32) {
            other[i] = {};
        }
    }
};

// What a thread has of a step's rows.
struct StepRows {
    XVector x[kRows];
    DyVector dy[kRows];

    // From column `first` of the block on, rows from group_row of the step on, of which there may be fewer in the last step.
    __device__ StepRows(const WideBlock& block, int stage, int j, int group_row, int first, int rows) {
        const WideArguments& a = block.a;
        const X* const place = reinterpret_cast<const X*>(block.ring + stage * block.place_bytes()) + group_row * block.pitch() + first;
        const int64 first_row = int64(j) * kStepRows + group_row;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            x[i].load(place + i * block.pitch() + block.lead(a.x, a.x_row_stride, first_row + i));
            dy[i].load(place + i * block.pitch() + block.part_elements() + block.lead(a.dy, a.dy_row_stride, first_row + i));
        }
        if (rows >= kRows) return;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (i < rows) continue;
            x[i] = {};
            dy[i] = {};
        }
    }
};

// dw or db, of all threads that work on rows; `scratch` has room for a float32 for each of their columns.
__device__ inline void write_sums(const WideBlock& block, const WideColumnSums& sums, void* target, int group, int first, bool holds,
                           float* scratch) {
    const WideArguments& a = block.a;
    if (!target) return;
    float values[kVector];
    sums.get(values);
    if (kGroups == 1 && a.aligned_sums && (a.dw_code == kFloat32 || a.dw_code == kCodeOf<X>)) {
        if (!holds) return;
        const int column = block.slab.first_column + first;
        if (a.dw_code == kFloat32) {
            Packed<float, kVector> packed;
            packed.pack(values);
            packed.store(static_cast<float*>(target) + column);
        } else {
            XVector packed;
            packed.pack(values);
            packed.store(static_cast<X*>(target) + column);
        }
        return;
    }
    constexpr int kGroupColumns = kThreads / kGroups * kVector;
    Packed<float, kVector> packed;
    packed.pack(values);
    barrier_over(kThreads);  // nobody reads any more what lies in `scratch`
    if (holds) packed.store(scratch + group * kGroupColumns + first);
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
__device__ inline void work(const WideBlock& block, const Weights<>& w, int first, bool holds) {
    const WideArguments& a = block.a;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int group = warp / kRowWarps, group_row = group * kRows, steps = a.steps;
    const int read_from = holds ? first : 0;  // who has no column reads one all the same; its w is 0
    const auto rows_of = [&](int j) { return j + 1 < steps ? kRows : int(a.rows - int64(j) * kStepRows) - group_row; };
    const auto step_rows = [&](int stage, int j) { return StepRows(block, stage, j, group_row, read_from, rows_of(j)); };
    WideStatistics statistics = {};
    statistics.load_next(a, group_row, 0);
    WideColumnSums dw, db;
    int rows_since_flush = 0;
    WideBlock::RingPlace place;
    int old_stage = 0;
    X* dx = a.dx + int64(group_row) * a.dx_row_stride + block.slab.first_column + first;

    for (int j = 0; j < steps + kBehind; ++j) {
        if (kSumsColumns && (rows_since_flush == kRowsPerFlush || j == steps)) {
            dw.flush();
            if constexpr (kWantDb) db.flush();
            rows_since_flush = 0;
        }
        statistics.advance(a, group_row, j);
        if (j < steps) {
            RowStatistics rows[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) rows[i] = statistics.of(j, 0, i);
            block.full[place.stage].wait(place.parity);
            const StepRows now = step_rows(place.stage, j);
            constexpr int kSums = kLayerNorm ? 2 : 1;
            float numbers[kRows * kSums];
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                float x[kVector], dy[kVector];
                now.x[i].unpack(x);
                now.dy[i].unpack(dy);
                Sums<float> sums = {0.0f, 0.0f};
#pragma unroll
                for (int v = 0; v < kVector; ++v) {
                    const float product = dy[v] * rows[i].centred(x[v]);
                    sums.first = fused(product, w.own[0][v], sums.first);
                    if constexpr (kLayerNorm) sums.second = fused(dy[v], w.own[0][v], sums.second);
                    if constexpr (kSumsColumns) dw.rows[v] += product * rows[i].rstd;
                    if constexpr (kSumsColumns && kWantDb) db.rows[v] += dy[v];
                }
                numbers[i * kSums] = sums.first;
                if constexpr (kLayerNorm) numbers[i * kSums + 1] = sums.second;
            }
            rows_since_flush += kRows;
            if (a.dx) {
                constexpr int kLanes = 32 / (kRows * kSums);
                const float sum = sum_numbers(numbers);
                const int number = lane / kLanes, row = number / kSums;
                Sums<float>& target = block.state.warps[block.slot(j)][(group_row + row) * kRowWarps + warp % kRowWarps];
                if (lane % kLanes == 0) (number % kSums ? target.second : target.first) = sum;
                __syncwarp();
                if (lane == 0) block.summed[block.slot(j)].arrive();
            }
            place.advance();
        } else if (kSumsColumns && j == steps) {
            float* const scratch = reinterpret_cast<float*>(block.ring + place.stage * block.place_bytes());
            write_sums(block, dw, a.dw, group, first, holds, scratch);
            if constexpr (kWantDb) write_sums(block, db, a.db, group, first, holds, scratch);
        }
        const int past = j - kBehind;
        if (past < 0) continue;
        if (a.dx) {
            const StepRows old = step_rows(old_stage, past);
            block.there[block.slot(past)].wait(block.parity(past));
            const int rows = rows_of(past);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const RowStatistics row = statistics.of(j, kBehind, i);
                const RowCoefficients coefficients(block.state.totals[block.slot(past)][group_row + i], a.reciprocal_columns, row);
                const XVector packed = second_half(0, old.x[i], old.dy[i], w, row, coefficients);
                if (holds && i < rows) packed.store_streaming(dx + i * a.dx_row_stride);
            }
            dx += kStepRows * a.dx_row_stride;
        }
        __syncwarp();
        if (lane == 0) block.done[old_stage].arrive();
        if (++old_stage == kStages) old_stage = 0;
    }
}

extern "C" __global__ void __launch_bounds__(kAllThreads, 1) backward_wide(const WideArguments a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ WideState state;
    const WideBlock block(a, state, shared);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    // A thread's vector, of the columns that the warps of a row share.
    const int first = (warp % kRowWarps * 32 + lane) * kVector;
    const bool holds = warp < kWarps && first < block.slab.columns;
    struct {
        int first;
        bool has;
        __device__ bool holds(int) const { return has; }
        __device__ int at(int) const { return first; }
    } const own = {first, holds};
    Weights<> w;
    const unsigned long long policy = cache_policy(a.read_once);
    if (warp == kWarps && elect_lane()) {
        block.make_barriers();
        block.fill(0, 0, policy);
        unsigned launches;
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(launches) : "l"(&block.memory().launches) : "memory");
#pragma unroll 1
        for (int j = 1; j < minimum(kStages, a.steps); ++j) block.fill(j, j, policy);
        state.launches = launches;
    }
    if (warp < kWarps) w.load(column_address(a.w, a.w_code, block.slab.first_column), a.w_code, own);
    __syncthreads();

    if (warp < kWarps) {
        work(block, w, first, holds);
    } else if (warp == kWarps) {
        if (elect_lane()) block.keep_filling(policy);
    } else if (a.dx) {
        if (warp == kWarps + 1) block.send(lane);
        else block.read(warp - kWarps - 2, lane);
    }
    // This block has all blocks' sums, so all have read which region to use.
    __syncthreads();
    if (a.dx && blockIdx.x == 0 && threadIdx.x == 0) {
        asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(&block.memory().launches), "r"(state.launches + 1) : "memory");
    }
}
