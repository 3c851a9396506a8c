// Blocks that keep their multiprocessors from others until they are told to leave, or `nanoseconds` have gone by.
extern "C" __global__ void occupy(const volatile int* leave, long long nanoseconds) {
    extern __shared__ char shared[];  // all that a multiprocessor has, so that nobody else finds room there
    if (threadIdx.x != 0) return;
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(2000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (!*leave && now - start < nanoseconds);
}
