// x, dy and z of a backward pass without its arithmetic: z = x + dy in 32-bit words, through a ring in shared memory
// that one thread of a block keeps filled. Or x and z of a forward pass: z = x + x.
//
// Compile-time switches: ARRAYS 2: x and dy are read; 1: x alone. DRAWN 0: block b takes steps b, b + blocks, …; 1: step b,
// and then what it draws from a counter. PACED 1: a block waits before a step more than one ahead of the average. BULK 0: z
// is stored by threads; 1: z takes x's place in the ring, and is copied from there. STEP_BYTES of each array in a step;
// STAGES of the ring; BLOCKS on a multiprocessor.
// Launch kThreads + 32 threads a block, with dynamic shared memory for the ring; x, dy and z start at multiples of 16
// bytes.
#include "element.cuh"
#include "pipeline.cuh"

constexpr int kArrays = ARRAYS;
constexpr bool kDrawn = DRAWN, kPaced = PACED, kBulk = BULK;
constexpr int kStages = STAGES, kThreads = 256;
constexpr int kWords = STEP_BYTES / 16;  // of 16 bytes: of each array in a step
constexpr int kThreadWords = kWords / kThreads;
static_assert(kThreadWords * kThreads * 16 == STEP_BYTES, "all threads have as much to do");
static_assert(!kDrawn || !kPaced, "there is one counter");
static_assert(kStages > 1, "one place is filled while another is read");

struct BlockState {
    Barrier::State full[kStages], done[kStages];
    int step[kStages];  // which one is in that place; the first that is not there ends the block
};

// Where the block has its turn j, and the parity of the phase that the place's barriers are in then.
struct Place {
    int stage, parity;

    __device__ explicit Place(int j) : stage(unsigned(j) % kStages), parity(unsigned(j) / kStages & 1) {}
};

struct Ring {
    uint4* base;
    Barrier full, done;
    int* steps;

    __device__ Ring(uint4* base, BlockState& state)
        : base(base), full{shared_address(state.full)}, done{shared_address(state.done)}, steps(state.step) {}

    __device__ uint4* x(const Place& place) const { return base + place.stage * kArrays * kWords; }
    __device__ uint4* last(const Place& place) const { return x(place) + (kArrays - 1) * kWords; }  // dy, or x itself
    __device__ void wait_until_done(int j) const {
        const Place place(j);
        done[place.stage].wait(place.parity);
    }
};

// The steps that a block takes, each known one step ahead. There are fewer than 2^31: 8 TB of x.
struct Walk {
    unsigned* counter;
    int next;

    __device__ explicit Walk(unsigned* counter) : counter(counter), next(blockIdx.x) {}
    __device__ int take() {
        const int step = next;
        if constexpr (kDrawn) next = int(gridDim.x + draw());
        else next += gridDim.x;
        return step;
    }

private:
    __device__ unsigned draw() const {
        unsigned drawn;
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(drawn) : "l"(counter) : "memory");
        return drawn;
    }
};

// Steps that all blocks have begun. A block counts each of its own, and waits before step j while all together have begun
// less than j − 1 each on average, as far as it knows: it reads the count a step ahead.
struct Pace {
    unsigned* counter;
    unsigned seen;

    __device__ explicit Pace(unsigned* counter) : counter(counter), seen(0) {}
    __device__ void begin(int j) {
        if constexpr (!kPaced) return;
        asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        while (j > 1 && unsigned(j - 1) * gridDim.x > seen) read();
        read();
    }
    // Who has no more steps counts as if it had one more than anyone.
    __device__ void end(int j, int most) {
        if constexpr (!kPaced) return;
        asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(most - j) : "memory");
    }

private:
    __device__ void read() {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    }
};

// Bulk copies to memory, one a group, by one thread, which waits until all but the last `pending` have been read.
__device__ inline void bulk_store(void* target, SharedAddress source, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int pending> __device__ inline void wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Copies z of turn j out of the ring.
__device__ inline void write(const Ring& ring, uint4* z, int j) {
    const Place place(j);
    ring.wait_until_done(j);
    bulk_store(z + int64(ring.steps[place.stage]) * kWords, shared_address(ring.x(place)), STEP_BYTES);
}

// By one thread: all that is copied by bulk copies.
__device__ inline void produce(const Ring& ring, const uint4* x, const uint4* dy, uint4* z, int steps, Walk walk) {
    constexpr int kBehind = kStages - 1;  // z is copied so many turns later, so that its place is free for the next
    Pace pace(walk.counter);
    for (int j = 0;; ++j) {
        const Place place(j);
        const int step = walk.take();
        if (step < steps) pace.begin(j);
        else pace.end(j, steps / int(gridDim.x) + 2);
        if constexpr (kBulk) {
            if (j >= kBehind) write(ring, z, j - kBehind);
            if (j >= kStages) wait_until_read<1>();
        } else if (j >= kStages) {
            ring.wait_until_done(j - kStages);
        }
        ring.steps[place.stage] = step;
        const Barrier full = ring.full[place.stage];
        if (step >= steps) {
            full.arrive();
            if constexpr (kBulk) {
                for (int k = j < kBehind ? 0 : j - kBehind + 1; k < j; ++k) write(ring, z, k);
                wait_until_read<0>();
            }
            return;
        }
        full.arrive_expecting(kArrays * STEP_BYTES);
        bulk_copy(shared_address(ring.x(place)), x + int64(step) * kWords, STEP_BYTES, full);
        if constexpr (kArrays == 2) {
            bulk_copy(shared_address(ring.last(place)), dy + int64(step) * kWords, STEP_BYTES, full);
        }
    }
}

// By all other threads: what is left of the arithmetic, and z's stores.
__device__ inline void consume(const Ring& ring, uint4* z, int steps) {
    for (int j = 0;; ++j) {
        const Place place(j);
        ring.full[place.stage].wait(place.parity);
        const int step = ring.steps[place.stage];
        if (step >= steps) return;
        uint4* const x = ring.x(place) + threadIdx.x;
        const uint4* const last = ring.last(place) + threadIdx.x;
        uint4 sums[kThreadWords];
#pragma unroll
        for (int k = 0; k < kThreadWords; ++k) {
            const uint4 a = x[k * kThreads], b = last[k * kThreads];
            sums[k] = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
        }
        uint4* const target = kBulk ? x : z + int64(step) * kWords + threadIdx.x;
#pragma unroll
        for (int k = 0; k < kThreadWords; ++k) target[k * kThreads] = sums[k];
        if constexpr (kBulk) fence_before_bulk_read();
        __syncwarp();
        if (threadIdx.x % 32 == 0) ring.done[place.stage].arrive();
    }
}

extern "C" __global__ void __launch_bounds__(kThreads + 32, BLOCKS)
    stream(const uint4* x, const uint4* dy, uint4* z, int steps, unsigned* counter) {
    extern __shared__ __align__(128) uint4 shared[];
    __shared__ BlockState state;

    const Ring ring(shared, state);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            ring.full[i].init(1);
            ring.done[i].init(kThreads / 32);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < kThreads) consume(ring, z, steps);
    else if (threadIdx.x == kThreads) produce(ring, x, dy, z, steps, Walk(counter));
}
