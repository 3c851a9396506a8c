// Enough of CUDA C++ to run the sources of kernels_cu/ on the CPU, where what they compute is checked without a GPU: see
// ../on_cpu.py. The threads of a block are fibers, run in turn, each until it waits for others. Blocks run one after the
// other, so shared memory is one of a kind, or, with BLOCKS_AT_ONCE, each in a thread of the CPU, which has its own. Nothing
// here says anything of speed, of memory order, or of clusters.
#pragma once

#include "standard.h"

#define __device__
#define __global__
#define __noinline__
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#ifdef BLOCKS_AT_ONCE
#define OF_BLOCK static thread_local
constexpr bool kBlocksRunAtOnce = true;
#else
#define OF_BLOCK static
constexpr bool kBlocksRunAtOnce = false;
#endif
#define __shared__ OF_BLOCK
#define __CUDA_ARCH__ 750  // so that no conversion to bfloat16 is one of the hardware's; else as on 9.0, not as on 12.0

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct Dimensions { unsigned x = 1, y = 1, z = 1; };
OF_BLOCK Dimensions threadIdx, blockIdx;
static Dimensions blockDim, gridDim;

namespace on_cpu {

constexpr int kWarp = 32, kStackBytes = 128 << 10, kSharedBytes = 256 << 10;
alignas(128) OF_BLOCK char shared[kSharedBytes];  // dynamic shared memory, of which a launch has `shared_bytes`
static int shared_bytes;
static int late_warp = -1;  // of each block: goes on only when nobody else of the block can

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "block %u,%u, thread %u: %s\n", blockIdx.x, blockIdx.y, threadIdx.x, what);
    std::abort();
}

// Where the scheduler and each fiber go on: fibers begin by a context, then they jump, which asks the operating system nothing.
struct Jump { jmp_buf to; };
OF_BLOCK Jump scheduler;
OF_BLOCK std::vector<Jump> fibers;
OF_BLOCK std::unique_ptr<char[]> stacks;  // no vector: of most pages nobody needs any, zeros or not
OF_BLOCK int stacks_of = 0;               // so many threads
OF_BLOCK std::vector<char> begun, ended;
OF_BLOCK bool progress;  // in this round some fiber went on

inline void yield() {
    if (!_setjmp(fibers[threadIdx.x].to)) _longjmp(scheduler.to, 1);
}
// By the scheduler: that thread, until it yields, or is through.
[[gnu::noinline]] inline void go_on(void (*thread)()) {
    if (_setjmp(scheduler.to)) return;
    if (begun[threadIdx.x]) _longjmp(fibers[threadIdx.x].to, 1);
    begun[threadIdx.x] = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks.get() + size_t(threadIdx.x) * kStackBytes;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;  // a thread that is through jumps, too
    makecontext(&context, thread, 0);
    setcontext(&context);
}
// What other blocks may be writing, so that who reads it over and over lets others go on.
template <class T> T read_anew(const void* source) {
    if (kBlocksRunAtOnce) yield();
    return __atomic_load_n(static_cast<const T*>(source), __ATOMIC_ACQUIRE);
}
template <class T, class U> void write(T* target, U value) { __atomic_store_n(target, T(value), __ATOMIC_RELEASE); }
template <class T, class U> T add(T* target, U value) { return __atomic_fetch_add(target, T(value), __ATOMIC_ACQ_REL); }
inline unsigned add_up_to(unsigned* target, unsigned last) {
    unsigned before = *target;
    while (!__atomic_compare_exchange_n(target, &before, before >= last ? 0 : before + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
    return before;
}
template <class Condition> void wait_until(Condition condition) {
    while (!condition()) yield();
    progress = true;
}

// A barrier of any number of threads, over and over.
struct Meeting {
    int arrived = 0;
    unsigned phase = 0;
    void wait(int threads) {
        const unsigned before = phase;
        if (++arrived == threads) {
            arrived = 0;
            ++phase;
            progress = true;
        } else {
            wait_until([&] { return phase != before; });
        }
    }
};
OF_BLOCK Meeting of_block, named[16], of_warp[kWarp];
OF_BLOCK uint64_t lanes[kWarp][kWarp];
OF_BLOCK int count;

inline void sync_warp() {
    const int warp = threadIdx.x / kWarp, left = blockDim.x - warp * kWarp;
    of_warp[warp].wait(left < kWarp ? left : kWarp);
}
template <class T> T from_lane(T value, int lane) {
    const int warp = threadIdx.x / kWarp;
    std::memcpy(&lanes[warp][threadIdx.x % kWarp], &value, sizeof(T));
    sync_warp();
    std::memcpy(&value, &lanes[warp][lane], sizeof(T));
    sync_warp();
    return value;
}

template <class To, class From> To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

// As `-ftz=true` has it, though of float64 as well, and only of this kind of CPU.
struct FlushesSubnormals {
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    FlushesSubnormals() { _mm_setcsr(before | 0x8040); }
    ~FlushesSubnormals() { _mm_setcsr(before); }
#endif
};

inline void bar_sync(int barrier, int threads) { named[barrier].wait(threads); }

template <class Kernel, class Arguments>
void launch(Kernel kernel, const Arguments& arguments, int blocks_x, int blocks_y, int threads, int bytes) {
    static Kernel current;
    static const Arguments* given;
    current = kernel;
    given = &arguments;
    shared_bytes = bytes;
    gridDim = {unsigned(blocks_x), unsigned(blocks_y), 1};
    blockDim = {unsigned(threads), 1, 1};
    const auto run = [threads, bytes](unsigned block) {
        const FlushesSubnormals flushes;  // its threads do, too
        if (stacks_of < threads) stacks.reset(new char[size_t(threads) * kStackBytes]);
        stacks_of = std::max(stacks_of, threads);
        fibers.resize(threads);
        blockIdx = {block % gridDim.x, block / gridDim.x, 0};
        std::memset(shared, 0x7f, kSharedBytes);  // 3.4e38: what is read before it is written shows
        begun.assign(threads, false);
        ended.assign(threads, false);
        auto last_progress = std::chrono::steady_clock::now();
        for (int left = threads; left;) {
            progress = false;
            for (const bool late : {false, true}) {
                for (int i = 0; i < threads && !(late && progress); ++i) {
                    if (ended[i] || (i / kWarp == late_warp) != late) continue;
                    threadIdx.x = i;
                    go_on([] {
                        current(*given);
                        ended[threadIdx.x] = progress = true;
                        _longjmp(scheduler.to, 1);
                    });
                    left -= ended[i];
                }
            }
            if (!left || progress) {
                last_progress = std::chrono::steady_clock::now();
                continue;
            }
            const auto waited = std::chrono::steady_clock::now() - last_progress;
            if (!kBlocksRunAtOnce || waited > std::chrono::minutes(2)) fail("all threads wait for ever");
            std::this_thread::yield();  // other blocks may be what they wait for
        }
        if (std::any_of(shared + bytes, shared + kSharedBytes, [](char byte) { return byte != 0x7f; })) {
            fail("it wrote beyond its shared memory");
        }
    };
    const unsigned blocks = gridDim.x * gridDim.y;
    if (kBlocksRunAtOnce) {
        std::vector<std::thread> all;
        for (unsigned block = 0; block < blocks; ++block) all.emplace_back(run, block);
        for (auto& one : all) one.join();
    } else {
        for (unsigned block = 0; block < blocks; ++block) run(block);
    }
}

}  // namespace on_cpu

template <class T> T __shfl_xor_sync(unsigned, T value, int distance) {
    return on_cpu::from_lane(value, threadIdx.x % 32 ^ distance);
}
// Of eight bytes, low ones first, those that the selector's digits name.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
template <class T> T __shfl_sync(unsigned, T value, int lane, int width = 32) {
    return on_cpu::from_lane(value, int(threadIdx.x % 32) / width * width + lane % width);
}
inline bool __all_sync(unsigned, bool value) {
    for (int lane = 0; lane < 32; ++lane) {
        if (!on_cpu::from_lane(value, lane)) return false;
    }
    return true;
}
inline void __syncwarp() { on_cpu::sync_warp(); }
inline void __syncthreads() { on_cpu::of_block.wait(blockDim.x); }
inline int __syncthreads_count(int value) {
    __syncthreads();
    on_cpu::count = 0;
    __syncthreads();
    on_cpu::count += value != 0;
    __syncthreads();
    return on_cpu::count;
}
inline int __syncthreads_or(int value) { return __syncthreads_count(value) != 0; }
inline void __threadfence() {}

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

template <class T> T __ldg(const T* source) { return *source; }
template <class T> T __ldcs(const T* source) { return *source; }
template <class T> void __stcs(T* target, T value) { *target = value; }
inline unsigned atomicInc(unsigned* target, unsigned most) {
    const unsigned before = *target;
    *target = before >= most ? 0 : before + 1;
    return before;
}

inline int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
inline float __uint_as_float(unsigned value) { return on_cpu::bits<float>(value); }
inline unsigned __float_as_uint(float value) { return on_cpu::bits<unsigned>(value); }
inline double __hiloint2double(int high, int low) {
    return on_cpu::bits<double>(uint64_t(unsigned(high)) << 32 | unsigned(low));
}
inline int __double2loint(double value) { return int(on_cpu::bits<uint64_t>(value)); }
inline int __double2hiint(double value) { return int(on_cpu::bits<uint64_t>(value) >> 32); }
inline float __double2float_rz(double value) {
    const float nearest = float(value);
    return std::fabs(double(nearest)) > std::fabs(value) ? std::nextafterf(nearest, 0.0f) : nearest;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
