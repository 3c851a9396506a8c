// Bulk asynchronous copies, mbarriers and clusters: thin names over the PTX of compute capability 9.0 and newer.
#pragma once

#if __CUDA_ARCH__ < 900
#error "bulk copies and clusters need compute capability 9.0"
#endif

using SharedAddress = unsigned;

__device__ inline SharedAddress shared_address(const void* pointer) {
    return SharedAddress(__cvta_generic_to_shared(pointer));
}

// A barrier in shared memory that counts arrivals and bytes; its phases alternate in parity, the first is 0. Known by its
// address, because finding that anew costs more than the operations do.
struct Barrier {
    using State = unsigned long long;
    SharedAddress address;

    __device__ Barrier operator[](int i) const { return {address + i * unsigned(sizeof(State))}; }
    __device__ void init(int arrivals) const {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
    }
    __device__ void arrive() const {
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address) : "memory");
    }
    // True for the last to arrive in a phase, who then may overwrite what the others are done with.
    __device__ bool arrive_last() const {
        State before;
        int pending;
        asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(before) : "r"(address) : "memory");
        asm("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(before));
        if (pending != 1) return false;
        // Arriving only released; this acquires, of a phase that is complete: nobody waits for its answer.
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "mbarrier.test_wait.shared.b64 done, [%0], %1;\n"
            "}\n" ::"r"(address), "l"(before)
            : "memory");
        return true;
    }
    __device__ void arrive_expecting(int bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    }
    __device__ void wait(int parity) const {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "again:\n"
            "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
            "@!done bra again;\n"
            "}\n" ::"r"(address), "r"(parity) : "memory");
    }
};

// Two addresses in memory, or distances between such, as they lie in shared memory.
struct alignas(16) Sources {
    unsigned long long first, second;
};
__device__ inline Sources load_sources(SharedAddress address) {
    Sources sources;
    asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(sources.first), "=l"(sources.second) : "r"(address) : "memory");
    return sources;
}
__device__ inline void store_sources(SharedAddress address, const Sources& sources) {
    asm volatile("st.shared.v2.u64 [%0], {%1, %2};" ::"r"(address), "l"(sources.first), "l"(sources.second) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// How a copy's lines leave the L2 cache: like others, or before these, which is right for what is read once. Each is made
// without a condition: under a predicate the compiler computes with the fraction, though that is 1 (20 instructions more).
__device__ inline unsigned long long cache_policy(bool read_once) {
    unsigned long long once, normal;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return read_once ? once : normal;
}

// Copies `bytes` (a multiple of 16; both addresses aligned to 16) and counts them on `barrier` when they have arrived.
__device__ inline void bulk_copy(SharedAddress target, const void* source, int bytes, Barrier barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier.address)
        : "memory");
}
__device__ inline void bulk_copy(SharedAddress target, const void* source, int bytes, Barrier barrier,
                                 unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        :
        : "r"(target), "l"(source), "r"(bytes), "r"(barrier.address), "l"(policy)
        : "memory");
}

// Adds 1 to each of four counters in memory; those that are at their last number (four in shared memory) go to 0. No fence
// waits for it.
__device__ inline void bulk_count(unsigned* counters, SharedAddress last) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.u32 [%0], [%1], 16;" ::"l"(counters), "r"(last)
                 : "memory");
}
// By the thread that wrote to shared memory what the copy engine is to read.
__device__ inline void fence_before_bulk_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Copies 16 bytes that others may be changing, some time later.
__device__ inline void copy_16_bytes(SharedAddress target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
// By the thread that asked for counts and 16-byte copies: of shared memory all is read and written.
__device__ inline void wait_for_counts() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// By all lanes of a warp: true for one of them, always the same. What it guards the compiler then knows to be one thread's, and
// puts no loop over lanes around a bulk copy, whose every turn waits until the copy engine has read its registers.
__device__ inline bool elect_lane() {
    unsigned elected;
    asm volatile(
        "{\n"
        ".reg .pred elected;\n"
        "elect.sync _|elected, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, elected;\n"
        "}\n"
        : "=r"(elected));
    return elected;
}

// Of the block, as the launch asked for.
__device__ inline int dynamic_shared_bytes() {
    int bytes;
    asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

__device__ inline int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of all blocks of the cluster, in two steps; what comes before the first is seen after the
// second. The first waits for this thread's loads, too; the relaxed one does not, and announces no more than barriers that
// were made.
__device__ inline void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The address of the same variable in the shared memory of the cluster's block `rank`.
__device__ inline SharedAddress address_in_block(SharedAddress address, int rank) {
    SharedAddress remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Stores a pair in another block and counts its bytes on that block's barrier when it has arrived.
__device__ inline void store_remote(SharedAddress target, SharedAddress barrier, float first, float second) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(target),
                 "f"(first), "f"(second), "r"(barrier)
                 : "memory");
}
__device__ inline void store_remote(SharedAddress target, SharedAddress barrier, double first, double second) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%0], {%1, %2}, [%3];" ::"r"(target),
                 "d"(first), "d"(second), "r"(barrier)
                 : "memory");
}
