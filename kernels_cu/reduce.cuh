// Sums over a group of threads, in an order that depends on nothing but the group's shape.
#pragma once

// One or two sums that travel together: backward Σ g·x̂ and Σ g, forward the first alone.
template <class C> struct alignas(2 * sizeof(C)) Sums {
    C first, second;
    __device__ void add(const Sums& other) {
        first += other.first;
        second += other.second;
    }
    // Of a group of so many neighbouring lanes, beyond whose last the first follows.
    template <bool kBoth> __device__ void take_from_lane(int lane, int lanes) {
        first = __shfl_sync(0xffffffffu, first, lane, lanes);
        if constexpr (kBoth) second = __shfl_sync(0xffffffffu, second, lane, lanes);
    }
};

// Butterfly over kLanes (a power of two, at most 32) neighbours: every lane gets the same bits, because each step adds
// the same two numbers on both sides.
template <bool kBoth, int kLanes, class C> __device__ void sum_over_lanes(Sums<C>& sums) {
    if constexpr (kBoth && kLanes == 32) {
        // Half of the lanes go on with one sum each: fewer exchanges than for both.
        const bool upper = threadIdx.x & 16;
        C own = upper ? sums.second : sums.first;
        own += __shfl_xor_sync(0xffffffffu, upper ? sums.first : sums.second, 16);
#pragma unroll
        for (int distance = 8; distance > 0; distance /= 2) own += __shfl_xor_sync(0xffffffffu, own, distance);
        const C other = __shfl_xor_sync(0xffffffffu, own, 16);
        sums = upper ? Sums<C>{other, own} : Sums<C>{own, other};
    } else {
#pragma unroll
        for (int distance = kLanes / 2; distance > 0; distance /= 2) {
            sums.first += __shfl_xor_sync(0xffffffffu, sums.first, distance);
            if constexpr (kBoth) sums.second += __shfl_xor_sync(0xffffffffu, sums.second, distance);
        }
    }
}

// The same, of lanes known when the kernel runs. Each number has its own code: in a loop a step took twice as long (LayerNorm
// forward, N=129, 1 GB, 236 → 212 us).
template <bool kBoth, class C> __device__ void sum_over_lanes(Sums<C>& sums, int lanes) {
    switch (lanes) {
        case 32: sum_over_lanes<kBoth, 32>(sums); break;
        case 16: sum_over_lanes<kBoth, 16>(sums); break;
        case 8: sum_over_lanes<kBoth, 8>(sums); break;
        case 4: sum_over_lanes<kBoth, 4>(sums); break;
        case 2: sum_over_lanes<kBoth, 2>(sums);
    }
}

// Adds up `count` entries, at most kMost (a power of two), with the lanes of each warp; every lane gets the same bits.
template <bool kBoth, int kMost, class C> __device__ Sums<C> sum_entries(const Sums<C>* entries, int count) {
    static_assert((kMost & (kMost - 1)) == 0, "a power of two");
    constexpr int kLanes = kMost < 32 ? kMost : 32;
    Sums<C> sums = {C(0), C(0)};
#pragma unroll
    for (int i = 0; i < kMost; i += kLanes) {
        const int entry = i + threadIdx.x % kLanes;
        const Sums<C> own = entries[minimum(entry, count - 1)];
        if (entry < count) sums.add(own);
    }
    sum_over_lanes<kBoth, kLanes>(sums);
    return sums;
}

// The same for any number of entries.
template <bool kBoth, class C> __device__ Sums<C> sum_many_entries(const Sums<C>* entries, int count) {
    Sums<C> sums = {C(0), C(0)};
    for (int entry = threadIdx.x % 32; entry < count; entry += 32) sums.add(entries[entry]);
    sum_over_lanes<kBoth, 32>(sums);
    return sums;
}

// Of the first `threads` threads of the block, whole warps.
__device__ inline void barrier_over(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

// Sums over the threads that share a row: lanes of a warp, or all warps of the block. One block barrier a sum; two
// buffers, so that a warp that is a sum ahead writes into the one that nobody reads.
template <class C, int kMaxWarps> struct GroupSum {
    Sums<C> warps[2][kMaxWarps];

    template <bool kBoth> __device__ void all(Sums<C>& sums, int group_threads, int& buffer) {
        if (group_threads <= 32) {
            sum_over_lanes<kBoth>(sums, group_threads);
        } else {
            sum_over_lanes<kBoth, 32>(sums);
            if (threadIdx.x % 32 == 0) warps[buffer][threadIdx.x / 32] = sums;
            __syncthreads();
            sums = sum_entries<kBoth, kMaxWarps>(warps[buffer], group_threads / 32);
            buffer ^= 1;
        }
    }
};
