// What the staged kernels share: rows walked in steps, a ring of steps in shared memory, the exchange of row sums.
//
// A row is split by columns over the CLUSTER blocks of a cluster, or those of a gang (gang.cuh), `slab_columns` each,
// COLUMNS_PER_THREAD a thread. A block that has whole rows may hold several `groups` of `group_threads` threads (a power of two
// then), each with a row of its own; the rows of a block lie one after the other in memory, or at one distance, and come with
// what lies between them (kHasGaps). A block keeps `stages` steps, of a row for each group, in flight, by bulk copies into its
// ring. A step comes in several copies, one for each team of neighbouring warps: the last of them that is done with it asks for
// more. Smaller teams wait less for each other, but lost where they made many small copies, of which a multiprocessor perhaps
// takes only one in some 50 cycles.
//
// With VECTOR = 0 rows may start anywhere: the copy takes the 16-byte words that cover the rows, at most 15 bytes more
// on either side, in words that hold at least one byte of a row.
//
// The copy engine moves whole lines of 128 bytes (inferred, from times). So where rows do not all begin at such (kOffLines), each
// lies as far from a line's start in the ring as in memory: RMSNorm, N=8136, 1 GB, 275 us where it began at one, 242 so.
//
// Compile-time switches, beside COLUMNS_PER_THREAD and VECTOR:
//   CLUSTER  blocks of a cluster                  GANG   1: rows are split over gangs, CLUSTER is 1
//   PACED    1: walkers keep pace in long launches (struct Pace)
//   OFF_LINES  1: rows in vectors that do not all begin at whole lines
//   ROW_GAPS  1: there are gaps between a block's rows, of a warp or less. A kernel for both would take longer off 16 bytes,
//             where it finds each column's place in x and in dy: in single columns, without gaps, N=129 476 → 530 us,
//             LayerNorm 257 392 → 434 (1 GB, an H100)
//
// Expects Compute, kVector and Columns.
#pragma once

#include "counters.cuh"
#include "pipeline.cuh"
#include "reduce.cuh"

#ifndef PACED
#define PACED 0
#endif
#ifndef OFF_LINES
#define OFF_LINES 0
#endif
#ifndef ROW_GAPS
#define ROW_GAPS 0
#endif

constexpr int kMaxThreads = 256;  // what leaves a thread the registers that it needs
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kCluster = CLUSTER;  // known when compiled: at N=65536 RMSNorm took 118 us so, 135 us as an argument
constexpr bool kClustered = kCluster > 1, kGang = GANG;
constexpr bool kSplitsRows = kClustered || kGang;  // over several blocks
static_assert(!kGang || (kCluster == 1 && kWholeWarps && sizeof(Compute) == 4), "what gangs were made for");
// Whether no row takes more than a warp. In single columns, where shared memory is small, several warps may share one with as few
// columns a thread.
constexpr bool kOneWarp = PART_OF_WARP || (VECTOR && !kWholeWarps);
static_assert(!kOneWarp || !kSplitsRows, "a warp's rows lie in one block");
static_assert(!ROW_GAPS || (!kWholeWarps && !kSplitsRows), "of longer rows in vectors a block has one, where there are gaps");
// Whether there may be gaps between a block's rows. Off 16 bytes in whole warps in any case: a warp's lanes all have the
// same row, whose place in x and in dy takes no register for each column (152 registers at N=1001, 157 so).
constexpr bool kHasGaps = ROW_GAPS || (!VECTOR && kWholeWarps && !kSplitsRows);
constexpr int kMaxStages = 8;
// Of a team: two warps where a thread has 32 or, forward, 64 columns; forward, where a row takes part of a warp, too (LayerNorm,
// N=128, 1 GB, 182.6 → 171.5 us). With 24, 28 and 40 a team's copies would be of 3 to 5 KB, which lost; so did four warps in
// place of two. In the largest clusters, where the blocks wait for each other, a team is the block, but for rows that take nearly
// all its memory.
constexpr bool kMayHaveTeams = VECTOR && (kWholeWarps || kColumnsPerThread == 32) && (kCluster < 16 || kManyColumns);
constexpr int kTeamColumnBytes = kMayHaveTeams ? kColumnsPerThread * int(sizeof(Compute)) : 0;
constexpr int kTeamThreads = kTeamColumnBytes < 128 ? kMaxThreads : kTeamColumnBytes % 128 == 0 ? 64 : 128;
constexpr int kTeamWarps = kTeamThreads / 32, kMaxTeams = kMaxThreads / kTeamThreads;

// Off lines a team's own part of a place may begin anywhere in a line, another one from step to step, and end there: it has room for
// that, lest it overwrite what its neighbours still read.
constexpr bool kOffLines = !VECTOR || OFF_LINES;
constexpr int kLeadBytes = kOffLines ? 128 * kMaxTeams : 0;
constexpr int kSlots = 4;  // a warp that posts sum j knows that all others have read sum j − 4

// A block's share of a row, and a thread's warp. No division, but in gangs: the first copies wait for this, and for what follows.
struct BlockColumns {
    int blocks;       // that share the row
    unsigned walker;  // that the block is, or belongs to
    int rank, first_column, columns;
    unsigned warp;  // of this thread; through a shuffle, so that the compiler knows that a warp's lanes agree

    template <class Arguments>
    __device__ explicit BlockColumns(const Arguments& a, unsigned blocks = kCluster)
        : blocks(blocks), walker(blockIdx.x / blocks),
          rank(kGang ? blockIdx.x - walker * blocks : kClustered ? cluster_rank() : 0), first_column(rank * a.slab_columns),
          columns(minimum(a.slab_columns, a.columns - first_column)),
          warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)) {}
};

// The same, a thread's place in the block, and what the thread's team reads of a step: some of a row's columns, or the rows of
// some groups.
struct BlockShare : BlockColumns {
    int groups, group, thread;
    int team, team_thread, team_warps;
    int team_group, team_rows;      // the first of the groups whose rows it reads, and how many
    int team_column, team_columns;  // the first column, from first_column on, and how many

    template <class Arguments>
    __device__ BlockShare(const Arguments& a, const BlockColumns& columns_of_block)
        : BlockColumns(columns_of_block), groups(kSplitsRows ? 1 : a.groups),
          group(groups > 1 ? (kWholeWarps ? warp * 32u : threadIdx.x) >> log2_of(a.group_threads) : 0),
          thread(threadIdx.x - group * a.group_threads), team(kMaxTeams > 1 ? warp / kTeamWarps : 0),
          team_group(0), team_rows(groups), team_column(0), team_columns(columns) {
        team_thread = threadIdx.x - team * kTeamThreads;
        const int threads = minimum(kTeamThreads, blockDim.x - team * kTeamThreads);
        team_warps = threads >> 5;
        if constexpr (kMaxTeams == 1) return;
        if (!kSplitsRows && groups > 1 && a.group_threads < kTeamThreads) {
            team_rows = minimum(kTeamThreads >> log2_of(a.group_threads), groups);
            team_group = team * team_rows;
        } else {
            team_rows = 1;
            team_group = group;
            team_column = (team * kTeamThreads - group * a.group_threads) * kColumnsPerThread;
            const int left = columns - team_column;
            team_columns = left < 0 ? 0 : minimum(left, threads * kColumnsPerThread);
        }
    }
};

// What a team has to do with a place in the ring.
struct alignas(16) PlaceState {
    Barrier::State full;  // what the team reads of a step has arrived
    Barrier::State done;  // all its warps are done with it
    Sources next;         // where what the place is filled with next lies in memory
    static constexpr int kDone = 8, kNext = 16;  // where these lie
};
static_assert(sizeof(Barrier::State) == PlaceState::kDone && 2 * sizeof(Barrier::State) == PlaceState::kNext, "as they lie");

struct BlockState {
    PlaceState places[kMaxStages][kMaxTeams];
    Sources lap;  // from what a place is filled with to what it is filled with next, in bytes
    static constexpr int kExchanges = kGang ? 1 : kMaxWarps;  // gangs have their own: GangState
    Barrier::State summed[kExchanges][kSlots];  // all warps of a group, in all blocks of the cluster, have posted a row's sums
    Sums<Compute> sums[kExchanges][kSlots * kCluster];
    Barrier::State columns_there;
};

// What a block knows of the others' pace. Of 16 bytes, which is what is counted and copied at a time, the first four count.
struct alignas(16) PaceState {
    unsigned seen[4];  // what all blocks that count in one place have counted, as of a step ago or two
    unsigned last[4];  // at which the count begins anew
    unsigned given_up;
    static constexpr int kLast = 16, kGivenUp = 32;  // where these lie
};

// The steps of one block, of `groups` consecutive rows each. The host divides the rows. Those that all walkers take in one step are
// few enough for 32 bits.
struct RowWalk {
    unsigned first, step;  // the row that step 0 begins with; rows from one step to the next
    int end;               // steps

    // Every one of `walkers` takes at least `steps` of the first `rows` rows.
    __device__ RowWalk(const BlockShare& share, int64 rows, int steps, unsigned walkers)
        : first(share.walker * share.groups), step(walkers * share.groups), end(steps + (row(steps) < rows)) {}
    __device__ int64 row(int j) const { return first + int64(unsigned(j)) * step; }
    __device__ bool has(int j) const { return j < end; }
};

// A place in the ring, and the parity of the phase that its barrier is in on this lap.
struct RingPlace {
    int stage = 0, parity = 0;

    __device__ void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// One array's part of every place in a ring, and where in it the thread's team has its own. With kHints the L2 cache is told
// what becomes of its lines (the forward pass, where it never matters, took up to 1% more with a hint that says nothing).
template <class T, bool kHints> struct RingPart {
    static constexpr int kElementBytes = sizeof(T);

    const T* source;  // the team's columns of row 0
    int64 row_stride;
    int offset;      // of the team's own, from a place's start
    int part_bytes;  // of the whole block
    unsigned long long policy;  // of the L2 cache

    template <class Arguments>
    __device__ RingPart(const Arguments& a, const BlockShare& share, const T* base, int64 row_stride, int part_offset,
                        bool read_once = false)
        : source(base + share.team_group * row_stride + share.first_column + share.team_column), row_stride(row_stride),
          policy(kHints ? cache_policy(read_once) : 0) {
        const int bytes = with_gaps(share, share.groups * a.slab_columns, share.groups) * int(sizeof(T));
        static_assert(VECTOR || kMaxTeams == 1, "there is room for the words that cover one team's rows");
        part_bytes = (bytes + kLeadBytes + 127) / 128 * 128;
        offset = part_offset + team_start(share) * int(sizeof(T)) + (kOffLines ? share.team * 128 : 0);
    }
    // How far behind `offset` the team's own of a step begin, so that they are as far from a line's start as in memory, where they
    // begin at `address`. RMSNorm, 100 MB, N=4096, stride N + 3: 38.4 us with all at the start of a line, 36.6 us so (and with rows
    // that fill their warps told apart).
    __device__ int lead_of(unsigned address) const {
        return kOffLines ? (address - (VECTOR ? unsigned(offset) : 0u)) % 128 : 0;
    }
    __device__ int lead(int64 row) const {
        const unsigned low_bits = unsigned(reinterpret_cast<unsigned long long>(source));
        return lead_of(low_bits + unsigned(row) * unsigned(row_stride * sizeof(T)));
    }
    __device__ unsigned long long address(int64 row) const {
        return reinterpret_cast<unsigned long long>(source + row * row_stride);
    }
    // In a place, from the row of one group to that of the next, in elements.
    __device__ int pitch(const BlockShare& share) const { return kHasGaps ? int(row_stride) : share.columns; }
    // Where in its part of a place the team's own begins, in elements.
    __device__ int team_start(const BlockShare& share) const { return share.team_group * pitch(share) + share.team_column; }
    // So many elements of `rows` rows, and what lies between these.
    __device__ int with_gaps(const BlockShare& share, int elements, int rows) const {
        return kHasGaps ? elements + (rows - 1) * (pitch(share) - share.columns) : elements;
    }
    // Bytes before the rows in the first of the 16-byte words that cover them.
    __device__ int before_words(int64 row) const { return VECTOR ? 0 : lead(row) % 16; }
    // Of these words.
    __device__ int copy_bytes(int64 row, int elements) const {
        return (before_words(row) + elements * int(sizeof(T)) + 15) / 16 * 16;
    }
    __device__ void copy(SharedAddress place, int64 row, int elements, Barrier full) const {
        const int before = before_words(row);
        copy_words(place + offset + lead(row) - before, address(row) - before, copy_bytes(row, elements), full);
    }
    __device__ void copy_words(SharedAddress target, unsigned long long start, int bytes, Barrier full) const {
        const void* const from = reinterpret_cast<const void*>(start);
        if constexpr (kHints) bulk_copy(target, from, bytes, full, policy);
        else bulk_copy(target, from, bytes, full);
    }
    // Where the thread's group has its row in a place, as if that began at the block's first column.
    __device__ const T* in(const char* place, const BlockShare& share, int64 row) const {
        const T* const team = reinterpret_cast<const T*>(place + offset + lead(row));
        return team + share.group * pitch(share) - team_start(share);
    }
};

// The ring, as one team has to do with it. With kSourcesAhead, where in memory lies what a place is filled with next is kept in
// shared memory: from the question of pace to the second copy it is then 18 instructions, not 43 (LayerNorm, N=65536), and
// LayerNorm's N=4096 needs 225 registers, not 254. The walk must be even, and no row off 16 bytes.
template <bool kSourcesAhead> struct Ring {
    const BlockShare& share;
    char* base;
    SharedAddress base_address;
    SharedAddress states;  // of the team's PlaceState for place 0; those of all teams lie before those of the next place
    SharedAddress lap;
    int stages, stage_bytes;
    int64 rows;
    int last_rows;  // that the team has in the walk's last step

    __device__ Ring(char* base, BlockState& state, const BlockShare& share, int stages, int stage_bytes, int64 rows,
                    const RowWalk& walk)
        : share(share), base(base), base_address(shared_address(base)), states(shared_address(&state.places[0][share.team])),
          lap(shared_address(&state.lap)), stages(stages), stage_bytes(stage_bytes), rows(rows),
          last_rows(kSourcesAhead && !kSplitsRows ? rows_of(walk.row(walk.end - 1)) : 1) {
        asm volatile("" : "+r"(base_address), "+r"(states));  // found here, once
        if constexpr (kSourcesAhead && !kSplitsRows) asm volatile("" : "+r"(last_rows));
    }

    __device__ char* place(int stage) const { return base + stage * stage_bytes; }
    __device__ SharedAddress state(int stage) const { return states + stage * kMaxTeams * int(sizeof(PlaceState)); }
    __device__ Barrier full(int stage) const { return {state(stage)}; }
    __device__ Barrier done(int stage) const { return {state(stage) + PlaceState::kDone}; }

    template <class... Part> __device__ void fill(int stage, int64 row, const Part&... parts) const {
        const int team_rows = rows_of(row), elements = team_rows * share.team_columns;
        const Barrier barrier = full(stage);
        if (kMaxTeams > 1 && !kSplitsRows && elements <= 0) return barrier.arrive();
        barrier.arrive_expecting((parts.copy_bytes(row, parts.with_gaps(share, elements, team_rows)) + ...));
        (parts.copy(base_address + stage * stage_bytes, row, parts.with_gaps(share, elements, team_rows), barrier), ...);
    }
    // By the first warp of each team, one lane of which does all: with a lane for each place, the compiler put loops over lanes
    // around all that is made or asked for (with w asked for by the same warp, too, an H100, 25 MB, forward, that took 2% more).
    // The first steps are asked for first of all, the others when these are well on their way: of what all blocks ask for at
    // once, no part is there much before the rest.
    template <int kFirst, class... Part> __device__ void start(const RowWalk& walk, const Part&... parts) const {
        if (!leads_team()) return;
        if (elect_lane()) {
#pragma unroll
            for (int j = 0; j < kFirst; ++j) make(j);
            fence_barrier_init();
#pragma unroll
            for (int j = 0; j < kFirst; ++j) {
                if (walk.has(j) && share.team_columns) fill(j, walk.row(j), parts...);
            }
#pragma unroll 1
            for (int j = kFirst; j < stages; ++j) make(j);
            fence_barrier_init();
        }
        if constexpr (kSourcesAhead) {
            const int j = share.team_thread;
            if (j >= stages) return;
            const Sources next = sources(walk.row(j + stages), parts...), now = sources(walk.row(j), parts...);
            store_sources(state(j) + PlaceState::kNext, next);
            if (j == 0) store_sources(lap, {next.first - now.first, next.second - now.second});
        }
    }
    template <int kFirst, class... Part> __device__ void start_others(const RowWalk& walk, const Part&... parts) const {
        if (!leads_team() || !share.team_columns || !elect_lane()) return;
#pragma unroll 1
        for (int j = kFirst; j < minimum(stages, walk.end); ++j) fill(j, walk.row(j), parts...);
    }
    // By every thread of a warp that is done with step j, at `place`. The last warp's way from its arrival to the copies is one
    // that all others wait for: it is kept short.
    template <class Walk, class Pace, class... Part>
    __device__ void fill_again(const RingPlace& place, const Walk& walk, int j, const Pace& pace,
                               const Part&... parts) const {
        __syncwarp();
        const bool more = walk.has(j + stages) && share.team_columns;
        const unsigned seen = pace.seen();  // asked for before the arrival, whose time it takes
        Sources next, step;
        if constexpr (kSourcesAhead) {
            next = load_sources(state(place.stage) + PlaceState::kNext);
            step = load_sources(lap);
        }
        if (more && elect_lane() && done(place.stage).arrive_last()) {
            pace.wait(j, seen);
            if constexpr (kSourcesAhead) {
                store_sources(state(place.stage) + PlaceState::kNext, {next.first + step.first, next.second + step.second});
                const bool last = j + stages + 1 == walk.end;
                fill_from(place.stage, next, last && !kSplitsRows ? last_rows : share.team_rows, parts...);
            } else {
                fill(place.stage, walk.row(j + stages), parts...);
            }
        }
        pace.step_done(j, walk.end);
    }
    // Whether there is anything to wait for.
    __device__ bool wait(const RingPlace& place) const {
        if (kMaxTeams > 1 && share.team_columns == 0) return false;
        full(place.stage).wait(place.parity);
        return true;
    }

private:
    __device__ bool leads_team() const { return share.warp % kTeamWarps == 0; }
    __device__ void make(int stage) const {
        full(stage).init(1);
        done(stage).init(share.team_warps);
    }
    // The team's rows of a step that begins with `row`; not one, where it has fewer.
    __device__ int rows_of(int64 row) const {
        const int64 left = rows - row - share.team_group;
        return left < share.team_rows ? int(left) : share.team_rows;
    }
    template <class First, class Second>
    __device__ static Sources sources(int64 row, const First& first, const Second& second) {
        return {first.address(row), second.address(row)};
    }
    template <class First, class Second>
    __device__ void fill_from(int stage, const Sources& from, int team_rows, const First& first, const Second& second) const {
        const Barrier barrier = full(stage);
        const int elements = team_rows * share.team_columns;
        if (kMaxTeams > 1 && !kSplitsRows && elements <= 0) return barrier.arrive();
        const int first_bytes = first.with_gaps(share, elements, team_rows) * First::kElementBytes;
        const int second_bytes = second.with_gaps(share, elements, team_rows) * Second::kElementBytes;
        const SharedAddress place = base_address + stage * stage_bytes;
        barrier.arrive_expecting(first_bytes + second_bytes);
        first.copy_words(place + first.offset + first.lead_of(from.first), from.first, first_bytes, barrier);
        second.copy_words(place + second.offset + second.lead_of(from.second), from.second, second_bytes, barrier);
    }
};

// Under the load some multiprocessors get ahead of others, and where rows are divided beforehand these end late. So in a
// long launch walkers keep pace: one that has `lead` / 4 steps less before it than the average asks for no more rows. Nobody
// waits for long: another block may not even have started, and wait itself for what this one holds. No bits depend on it.
//
// The copy engine counts: by `red`, counting alone took up to 9% more. What pace adds to a step is short, for a row's other
// warps wait for the warp that does it (LayerNorm, N=3072, 1 GB, 261 us where it was long, 245 without pace, 243 as it is). A
// place takes only so many counts, so blocks count every second step (RMSNorm, N=14336, 1 GB, 241.9 → 239.6).
//
// One place is the best average. But of LayerNorm's blocks that share a multiprocessor, 264 in all, it takes too many counts
// (N=768 249 to 257 us, 243 in four places, each for a range of the blocks); of a thousand blocks, as rows with gaps have, of
// RMSNorm's, too: MOST_BLOCKS_A_COUNTER of config/backward.py. Where in memory places lie matters; why was not found out.
struct Pace {
    static constexpr int kMostTries = 16;  // each waits for the L2 cache
    // By every step LayerNorm took, 1 GB, N=256 247.3 us, not 248.6, 512 244.6, not 245.5; its forward pass, 32768, 168, not 179.
    static constexpr unsigned kStepsACount = kManyColumns || (kLayerNorm && kColumnsPerThread == 16) ? 1 : 2;

    unsigned* counter;     // 16 bytes, of counts; it is at 0 again when all steps are done
    SharedAddress state;
    unsigned blocks;       // that count there; 0: no pace is kept
    bool counts_here;      // by this warp, the block's first
    int slack;             // how far the steps that it counts may be behind `blocks` times those of this one

    template <class Arguments>
    __device__ Pace(const Arguments& a, StepCounter* counters, PaceState& shared, const RowWalk& walk,
                    const BlockShare& share)
        : state(shared_address(&shared)), blocks(0), counts_here(false), slack(0) {
        asm volatile("" : "+r"(state));  // found here, once
        if (!a.lead) return;
        const unsigned walkers = gridDim.x / unsigned(share.blocks), walker = share.walker;
        const unsigned range = (walkers + a.step_counters - 1) >> log2_of(a.step_counters);  // walkers of a place
        unsigned first = 0;
        for (; walker - first >= range; first += range) ++counters;
        const unsigned all_steps = (a.rows + share.groups - 1) >> log2_of(share.groups);
        const auto of_place = [&](unsigned n) { return n < first ? 0 : minimum(n - first, range); };
        const unsigned all = of_place(walkers), longer = of_place(all_steps - a.steps * walkers);  // by one step
        const unsigned steps = (all * a.steps + longer) * share.blocks;
        const unsigned counts = ((all - longer) * counts_of(a.steps) + longer * counts_of(a.steps + 1)) * share.blocks;
        counter = counters->steps;
        blocks = all * share.blocks;
        counts_here = share.warp == 0;
        // Half of the steps since a block's last count are done on average.
        slack = int((a.lead + 2 * (kStepsACount - 1)) * blocks / 4) + int(walk.end * blocks - steps);
        if (threadIdx.x != 0) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            shared.seen[i] = 0;
            shared.last[i] = i == 0 ? counts - 1 : 0;
        }
        shared.given_up = 0;
        fence_before_bulk_read();
    }
    // Of a walk of so many steps; the last count may be of fewer.
    __device__ static unsigned counts_of(unsigned steps) { return (steps + kStepsACount - 1) / kStepsACount; }

    // By every thread of a warp that is done with step j of `end`.
    __device__ void step_done(int j, int end) const {
        if (!counts_here || !elect_lane()) return;
        if (unsigned(j + 1) % kStepsACount == 0 || j + 1 == end) bulk_count(counter, state + PaceState::kLast);
        copy_16_bytes(state, counter);
    }
    // What the counter held a step ago or two.
    __device__ unsigned seen() const {
        unsigned counts;
        asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(counts) : "r"(state) : "memory");
        return counts;
    }
    // By the thread that asks for more when step j is done, of which the others wait for this one. All in one piece: over a
    // loop, the compiler no longer knows that a warp's lanes agree, and takes 40 registers more.
    __device__ void wait(int j, unsigned seen) const {
        if (!blocks) return;
        asm volatile(
            "{\n"
            ".reg .pred given_up, behind, again;\n"
            ".reg .u32 flag, seen, tries;\n"
            ".reg .s32 ahead;\n"
            "mul.lo.u32 seen, %6, %5;\n"
            "sub.s32 ahead, %1, seen;\n"
            "setp.le.s32 behind, ahead, 0;\n"
            "@behind bra done;\n"
            "ld.volatile.shared.u32 flag, [%0 + %3];\n"
            "setp.ne.u32 given_up, flag, 0;\n"
            "@given_up bra done;\n"
            "mov.u32 tries, %4;\n"
            "more:\n"
            "ld.relaxed.gpu.global.u32 seen, [%2];\n"
            "mul.lo.u32 seen, seen, %5;\n"
            "sub.s32 ahead, %1, seen;\n"
            "setp.le.s32 behind, ahead, 0;\n"
            "@behind bra done;\n"
            "sub.u32 tries, tries, 1;\n"
            "setp.ne.u32 again, tries, 0;\n"
            "@again bra more;\n"
            "st.volatile.shared.u32 [%0 + %3], 1;\n"
            "done:\n"
            "}\n" ::"r"(state), "r"((j + 1) * blocks - slack), "l"(counter), "n"(PaceState::kGivenUp),
            "n"(kMostTries), "n"(kStepsACount), "r"(seen)
            : "memory");
    }
    // Before the block leaves: nothing reads or writes its shared memory any more.
    __device__ void finish() const {
        if (counts_here && elect_lane()) wait_for_counts();
    }
};
template <bool kKept> struct PaceOf : Pace { using Pace::Pace; };
template <> struct PaceOf<false> {
    template <class... Any> __device__ PaceOf(const Any&...) {}
    __device__ void step_done(int, int) const {}
    __device__ unsigned seen() const { return 0; }
    __device__ void wait(int, unsigned) const {}
    __device__ void finish() const {}
};

// A group's sums of a row, kBoth of a pair or the first alone: those of its warps, which are posted in a slot.
template <bool kBoth> struct GroupSums {
    Sums<Compute>* slots;
    int lanes, warps, entries;  // in a warp, in this block, of a slot

    __device__ GroupSums(Sums<Compute>* slots, int group_threads)
        : slots(slots), lanes(lanes_of(group_threads)), warps(kOneWarp ? 1 : (group_threads + 31) / 32), entries(warps * kCluster) {}

    // Over the lanes of the warp that belong to the group.
    __device__ void sum_in_warp(Sums<Compute>& sums) const {
        if constexpr (PART_OF_WARP) {
            sum_over_lanes<kBoth, PART_OF_WARP>(sums);
        } else if constexpr (!kWholeWarps) {
            sum_over_lanes<kBoth>(sums, lanes);
        } else if (!kManyColumns || lanes == 32) {
            sum_over_lanes<kBoth, 32>(sums);
        } else {
            // A loop that never runs: over it, the compiler does not keep many columns unpacked.
            for (int distance = lanes / 2; distance > 0; distance /= 2) {
                sums.first += __shfl_xor_sync(0xffffffffu, sums.first, distance);
            }
        }
    }
};

// Their exchange. Sum j uses slot j % kSlots.
template <bool kBoth> struct SumExchange : GroupSums<kBoth> {
    using GroupSums<kBoth>::slots, GroupSums<kBoth>::warps, GroupSums<kBoth>::entries, GroupSums<kBoth>::sum_in_warp;
    Barrier summed;
    int rank;

    __device__ SumExchange(BlockState& state, const BlockShare& share, int group_threads)
        : GroupSums<kBoth>(state.sums[share.group * group_threads / 32], group_threads),
          summed{shared_address(state.summed[share.group * group_threads / 32])}, rank(share.rank) {
        asm volatile("" : "+r"(summed.address));
    }

    // By all threads of a group; its last warp makes the barriers, for the first asks for rows.
    __device__ void start(int thread) const {
        if (entries == 1 || __shfl_sync(0xffffffffu, thread / 32, 0) != warps - 1 || !elect_lane()) return;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) summed[slot].init(kClustered ? 1 : warps);
        fence_barrier_init();
    }

    // Returns the warp's sums, for a group that needs no more.
    __device__ Sums<Compute> post(Sums<Compute> sums, int j, int thread) const {
        sum_in_warp(sums);
        post_warp(sums, j, thread);
        return sums;
    }

    // Posts what all lanes of the warp hold alike.
    __device__ void post_warp(const Sums<Compute>& sums, int j, int thread) const {
        if (entries == 1) return;
        const int slot = unsigned(j) % kSlots, warp = thread / 32, lane = thread % 32;
        Sums<Compute>* entry = slots + slot * entries + rank * warps + warp;
        if constexpr (kClustered) {
            if (thread == 0) summed[slot].arrive_expecting(entries * int(sizeof(Sums<Compute>)));
            if (lane < kCluster) {
                store_remote(address_in_block(shared_address(entry), lane),
                             address_in_block(summed[slot].address, lane), sums.first, sums.second);
            }
        } else if (lane == 0) {
            *entry = sums;
            summed[slot].arrive();
        }
    }

    // The entries of sum j, when all are there: those of warp 0 of block 0, warp 1 of block 0, …
    __device__ const Sums<Compute>* wait(int j) const {
        const int slot = unsigned(j) % kSlots;
        summed[slot].wait(unsigned(j) / kSlots & 1);
        return slots + slot * entries;
    }

    __device__ Sums<Compute> collect(int j, const Sums<Compute>& posted) const {
        if (entries == 1) return posted;
        return sum_entries<kBoth, kMaxWarps * kCluster>(wait(j), entries);
    }
};

// A block's columns of an array over columns, copied to `place` where they fit and are aligned. To be asked for before the
// rows: loads behind them came 4 us later at 25 MB, also where the array had been prefetched into the L2 cache, and copies behind
// the first rows took calls of 6 MB 5 to 10% more. By the block's last warp, for the first asks for rows. Of one array: forward,
// LayerNorm, 100 MB, w and b so took up to 9% more than w alone.
struct ColumnsAhead {
    Barrier there;
    const void* source;  // the block's first column, once wait() has returned
    bool copied;

    __device__ ColumnsAhead(BlockState& state, const BlockColumns& block, const void* base, int code, void* place,
                            int place_bytes)
        : there{shared_address(&state.columns_there)}, source(column_address(base, code, block.first_column)) {
        const bool aligned = unsigned(reinterpret_cast<unsigned long long>(source)) % 16 == 0;
        const int bytes = (block.columns * element_bytes(code) + 15) / 16 * 16;  // whole words that hold a column
        copied = base && aligned && bytes <= place_bytes;
        if (!copied) return;
        if (block.warp == (blockDim.x - 1) / 32 && elect_lane()) {
            there.init(1);
            fence_barrier_init();
            there.arrive_expecting(bytes);
            bulk_copy(shared_address(place), source, bytes, there);
        }
        source = place;
    }
    __device__ void wait() const {
        if (copied) there.wait(0);
    }
};

// Barriers are there for all threads of the block, and of the cluster, when each has announced what it made, and waited.
__device__ inline void announce_barriers() {
    if constexpr (kClustered) cluster_arrive_relaxed();
}
__device__ inline void wait_for_barriers() {
    if constexpr (kClustered) cluster_wait();
    else __syncthreads();
}
// No block leaves while another may still store into its shared memory.
__device__ inline void leave_together() {
    if constexpr (kClustered) {
        cluster_arrive();
        cluster_wait();
    }
}
