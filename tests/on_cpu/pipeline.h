// In the place of kernels_cu/pipeline.cuh: copies arrive at once, and barriers count as the hardware's do. Of clusters there are
// names only, for kernels that have none.
#pragma once

using SharedAddress = unsigned long long;

inline SharedAddress shared_address(const void* pointer) { return SharedAddress(pointer); }

struct Barrier {
    using State = unsigned long long;
    SharedAddress address;

    Barrier operator[](int i) const { return {address + i * sizeof(State)}; }
    void init(int arrivals) const { phase() = {0, short(arrivals), short(arrivals << 1)}; }
    void arrive() const { arrive_last(); }
    bool arrive_last() const {
        if (phase().pending <= 0) on_cpu::fail("one more arrival than a barrier was made for");
        const bool last = --phase().pending == 0;
        complete();
        return last;
    }
    void arrive_expecting(int bytes) const {
        phase().bytes += bytes;
        arrive();
    }
    void arrived(int bytes) const {
        phase().bytes -= bytes;
        complete();
    }
    void wait(int parity) const {
        on_cpu::wait_until([&] { return (phase().arrivals_and_parity & 1) != parity; });
    }

private:
    struct Phase {
        int bytes;  // on their way
        short pending, arrivals_and_parity;
    };
    static_assert(sizeof(Phase) == sizeof(State));

    Phase& phase() const { return *reinterpret_cast<Phase*>(address); }
    void complete() const {
        if (phase().pending != 0 || phase().bytes != 0) return;
        phase().arrivals_and_parity ^= 1;
        phase().pending = phase().arrivals_and_parity >> 1;
        on_cpu::progress = true;
    }
};

struct alignas(16) Sources {
    unsigned long long first, second;
};
inline Sources load_sources(SharedAddress address) { return *reinterpret_cast<const Sources*>(address); }
inline void store_sources(SharedAddress address, const Sources& sources) { *reinterpret_cast<Sources*>(address) = sources; }

inline void fence_barrier_init() {}
// Memory of the arrays that there are: first and last address of each. A copy's words all hold a byte of one of them.
namespace on_cpu {
inline const SharedAddress* arrays;
inline int array_count;
inline void check_source(SharedAddress source, int bytes) {
    for (int i = 0; i < array_count; ++i) {
        if (source + 15 >= arrays[2 * i] && source + bytes - 16 <= arrays[2 * i + 1]) return;
    }
    fail("a bulk copy reads what lies in no array");
}
}  // namespace on_cpu
extern "C" void know_arrays(const SharedAddress* bounds, int count) {
    on_cpu::arrays = bounds;
    on_cpu::array_count = count;
}

inline void bulk_copy(SharedAddress target, const void* source, int bytes, Barrier barrier) {
    if (on_cpu::array_count) on_cpu::check_source(SharedAddress(source), bytes);
    const auto start = SharedAddress(on_cpu::shared);
    if ((target | SharedAddress(source) | unsigned(bytes)) % 16) on_cpu::fail("a bulk copy is off 16 bytes");
    if (target < start || target + bytes > start + on_cpu::shared_bytes) on_cpu::fail("a bulk copy leaves shared memory");
    std::memcpy(reinterpret_cast<void*>(target), source, bytes);
    barrier.arrived(bytes);
}
inline unsigned long long cache_policy(bool) { return 0; }
inline void bulk_copy(SharedAddress target, const void* source, int bytes, Barrier barrier, unsigned long long) {
    bulk_copy(target, source, bytes, barrier);
}
inline void bulk_count(unsigned* counters, SharedAddress last) {
    const auto most = reinterpret_cast<const unsigned*>(last);
    for (int i = 0; i < 4; ++i) atomicInc(counters + i, most[i]);
}
inline void fence_before_bulk_read() {}
inline void copy_16_bytes(SharedAddress target, const void* source) {
    std::memcpy(reinterpret_cast<void*>(target), source, 16);
}
inline void wait_for_counts() {}
inline bool elect_lane() {
    on_cpu::sync_warp();  // of all lanes
    return threadIdx.x % 32 == 0;
}
inline int dynamic_shared_bytes() { return on_cpu::shared_bytes; }

inline int cluster_rank() { return 0; }
inline void cluster_arrive_relaxed() {}
inline void cluster_arrive() {}
inline void cluster_wait() {}
inline SharedAddress address_in_block(SharedAddress address, int) { return address; }
template <class T> void store_remote(SharedAddress, SharedAddress, T, T) { on_cpu::fail("there are no clusters here"); }
