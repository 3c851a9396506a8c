// The exchange of a row's sums between the blocks of a gang: as many blocks as a row needs, anywhere on the device, through
// memory, which here is the L2 cache.
//
// Clusters of sixteen leave 20 of 132 multiprocessors without work, and no cluster is larger. A gang has any size, but its
// exchange takes longer than a cluster's, so a row's second half comes kGangBehind steps after its first. The blocks of a gang
// wait for each other, so all blocks of the launch must run at the same time: it is a cooperative one.
//
// Warps take turns. The one whose turn it is adds up what the block's warps have posted, later in that step, when none is awaited
// any more, and stores it for the others, each sum beside a tag that says of which row it is. Nothing else orders them: no fence,
// no counter. As many warps as it takes to have a lane for each block, usually that one alone, read all blocks' until the tags are
// right, and leave the row's sums in shared memory, before they post what comes next: so the others, which do that meanwhile, find
// them there. A gang has no more blocks than a block threads. Where the last warp to post added up and stored, and the first always
// read, when the sums were due, all waited for these: 1 GB, N=262144, an H200, RMSNorm 253 → 250 us, LayerNorm 280 → 259 (both
// without pace). Reads of all eight warps slowed the others down (N=65536, RMSNorm, an H100, 345 → 366 us). Order of sums: warps by
// a butterfly, then up to 32 blocks by a butterfly, these in turn.
//
// Expects staged.cuh; Compute is float.
#pragma once

#include "staged.cuh"

// 1 GB, N=131072, an H100, rings of four steps: with one LayerNorm took 354 us, with two 343, where one warp always read. Since
// warps take turns two take 342, RMSNorm 338; three, with rings of five and six steps, 345 and 342, on an H200 as long as two.
constexpr int kGangBehind = 2;
// A warp that posts sum j has collected sum j − kGangBehind − 1, so all blocks have sent that, and all their warps collected the
// one as far before it. Where several warps read, one may be a step ahead of another.
constexpr int kGangSlots = 4, kGangEntries = 8;  // of sums in a block and in memory: powers of two
static_assert(kGangSlots >= kGangBehind + 2 && kGangEntries >= 2 * kGangBehind + 2, "nobody still reads what is overwritten");

// In memory, before the entries. It and they are zero before the first launch that uses them; launches that do follow one another,
// so that whatever an entry has from an earlier one has an earlier tag.
struct alignas(128) GangMemory {
    unsigned before;  // tags that were used
    unsigned left;    // blocks of this launch that have collected all
};
// Where memory is kept from launch to launch, it has so many bytes. They are zero again before tags come a second time, which an
// entry that was not written since might still have.
constexpr int kKeptBytes = 32 << 10;  // KEPT_EXCHANGE_BYTES of config/walkers.py
constexpr unsigned kMostTags = 1u << 31;

struct GangState {
    Barrier::State summed[kGangSlots];  // all warps of the block have their sums of a row
    Barrier::State there[kGangSlots];   // the readers have those of all blocks
    Sums<float> warps[kGangSlots][kMaxWarps];
    Sums<float> totals[kGangSlots][kMaxWarps];  // of each reader's blocks
};

// A group's exchange of row sums, kBoth of a pair or the first alone, as SumExchange has it for clusters.
template <bool kBoth> struct GangExchange {
    using Tagged = unsigned long long;  // a sum, and above it its tag: read at once
    // What a reading lane has of its entry.
    struct Asked {
        Tagged first, second;
        bool settled;  // nothing is left to do
    };
    static constexpr int kEntryBytes = (kBoth ? 2 : 1) * int(sizeof(Tagged));  // room is made for both

    GangState& state;
    Barrier summed, there;
    int warps, warp;  // of the block, a power of two; this thread's
    int readers, blocks, rank;
    GangMemory* memory;
    char* entries;    // of the gang
    unsigned before;  // the launch's first tag is the next

    __device__ GangExchange(GangState& state, const BlockShare& share, void* gang_memory)
        : state(state), summed{shared_address(state.summed)}, there{shared_address(state.there)}, warps(blockDim.x / 32),
          warp(share.warp), readers((share.blocks + 31) / 32), blocks(share.blocks), rank(share.rank),
          memory(static_cast<GangMemory*>(gang_memory)),
          entries(reinterpret_cast<char*>(memory + 1) + share.walker * kGangEntries * blocks * kEntryBytes) {
        asm volatile("" : "+r"(summed.address), "+r"(there.address));
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(&memory->before) : "memory");
    }

    // By all threads of the block; see SumExchange.
    __device__ void start(int thread) const {
        if (__shfl_sync(0xffffffffu, thread / 32, 0) != warps - 1 || !elect_lane()) return;
#pragma unroll
        for (int slot = 0; slot < kGangSlots; ++slot) {
            summed[slot].init(warps);
            there[slot].init(readers);
        }
        fence_barrier_init();
    }

    // Returns nothing of use: no sum is a warp's own.
    __device__ Sums<float> post(Sums<float> sums, int j, int thread) const {
        sum_over_lanes<kBoth, 32>(sums);
        if (thread % 32 == 0) {
            state.warps[slot(j)][warp] = sums;
            summed[slot(j)].arrive();
        }
        return sums;
    }
    // The block's sum j of `end`, some time after this warp has posted its own.
    __device__ void send(int j, int end) const {
        if (j >= end || turn(j) != 0) return;
        summed[slot(j)].wait(parity(j));
        const Sums<float> sums = sum_entries<kBoth, kMaxWarps>(state.warps[slot(j)], warps);
        if (threadIdx.x % 32 == 0) store(entry(j, rank), sums, tag(j));
    }

    // Sum j as it is by now, some time before it is to be collected; then, if it is there, it is settled. Not where all warps read:
    // none would post meanwhile (1 GB, N=524288, float32, RMSNorm 325 → 295 us).
    __device__ Asked ask(int j) const { return reads(j) ? load(own_entry(j)) : Asked{}; }
    __device__ void settle(int j, Asked& asked) const {
        if (j < 0 || !reads(j) || readers == warps) return;
        asked.settled = __all_sync(0xffffffffu, is_of(asked, tag(j)));
        if (asked.settled) add_blocks(j, asked);
    }
    __device__ Sums<float> collect(int j, Asked asked) const {
        if (reads(j) && !asked.settled) {
            while (!is_of(asked, tag(j))) asked = load(own_entry(j));
            __syncwarp();
            add_blocks(j, asked);
        }
        there[slot(j)].wait(parity(j));
        Sums<float> sums = state.totals[slot(j)][0];
#pragma unroll 1  // one, usually
        for (int i = 1; i < readers; ++i) sums.add(state.totals[slot(j)][i]);
        return sums;
    }

    // By all threads of each of `all_blocks`, when they have collected all sums, at most so many: the next launch has new tags.
    __device__ void leave(unsigned all_blocks, unsigned sums) const {
        __syncthreads();
        if (threadIdx.x != 0) return;
        unsigned others;
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(others) : "l"(&memory->left) : "memory");
        if (others + 1 != all_blocks) return;
        if (before < kMostTags) {
            memory->left = 0;
            memory->before = before + sums;
        } else {
            for (int i = 0; i < kKeptBytes / 16; ++i) reinterpret_cast<uint4*>(memory)[i] = {};
        }
    }

private:
    __device__ static int slot(int j) { return unsigned(j) % kGangSlots; }
    __device__ static int parity(int j) { return unsigned(j) / kGangSlots & 1; }
    // As many warps as readers from sum to sum: with one, a warp would read several sums in turn (1 GB, N=524288, an H200, RMSNorm
    // 273.8 → 258.1 us, LayerNorm 274.6 → 268.9).
    __device__ int turn(int j) const { return (warp - readers * j) & (warps - 1); }
    __device__ bool reads(int j) const { return turn(j) < readers; }
    // What a reader's lane reads; beyond the last block that once more.
    __device__ int lane_block(int j) const { return turn(j) * 32 + threadIdx.x % 32; }
    __device__ char* own_entry(int j) const { return entry(j, minimum(lane_block(j), blocks - 1)); }
    __device__ void add_blocks(int j, const Asked& asked) const {
        Sums<float> sums = {0.0f, 0.0f};
        if (lane_block(j) < blocks) {
            sums.first = __uint_as_float(unsigned(asked.first));
            if constexpr (kBoth) sums.second = __uint_as_float(unsigned(asked.second));
        }
        sum_over_lanes<kBoth, 32>(sums);
        if (threadIdx.x % 32 == 0) {
            state.totals[slot(j)][turn(j)] = sums;
            there[slot(j)].arrive();
        }
    }
    __device__ unsigned tag(int j) const { return before + 1 + j; }
    __device__ char* entry(int j, int block) const {
        return entries + (unsigned(j) % kGangEntries * blocks + block) * kEntryBytes;
    }
    __device__ static bool is_of(const Asked& asked, unsigned tag) {
        return unsigned(asked.first >> 32) == tag && (!kBoth || unsigned(asked.second >> 32) == tag);
    }
    __device__ static Tagged tagged(float sum, unsigned tag) { return Tagged(tag) << 32 | __float_as_uint(sum); }
    __device__ static Asked load(const char* entry) {
        Asked asked = {};
        if constexpr (kBoth) {
            asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                         : "=l"(asked.first), "=l"(asked.second) : "l"(entry) : "memory");
        } else {
            asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(asked.first) : "l"(entry) : "memory");
        }
        return asked;
    }
    __device__ static void store(char* entry, const Sums<float>& sums, unsigned tag) {
        if constexpr (kBoth) {
            asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(entry), "l"(tagged(sums.first, tag)),
                         "l"(tagged(sums.second, tag)) : "memory");
        } else {
            asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(entry), "l"(tagged(sums.first, tag)) : "memory");
        }
    }
};
