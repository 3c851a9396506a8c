// z = x + dy, the yardstick: two reads and one write of every element, and nothing else that a memory system
// could wait for. A kernel that reads x and dy and writes dx cannot be faster than this.
//
// Compile with -DELEMENT=float16, bfloat16, float32 or float64, and -DSTREAMING for accesses that ask to be
// evicted first. One thread adds one 16-byte vector; x, dy and z start at multiples of 16 bytes (CuPy allocates
// so). The elements after the last whole vector get a thread each: launch at least
// elements / PER_VECTOR + elements % PER_VECTOR threads.

#ifndef ELEMENT
#define ELEMENT bfloat16
#endif

struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };
using float32 = float;
using float64 = double;

__device__ float32 add(float32 a, float32 b) { return a + b; }
__device__ float64 add(float64 a, float64 b) { return a + b; }

__device__ float16 add(float16 a, float16 b)
{
    float a32, b32;
    float16 sum;
    asm("cvt.f32.f16 %0, %1;" : "=f"(a32) : "h"(a.bits));
    asm("cvt.f32.f16 %0, %1;" : "=f"(b32) : "h"(b.bits));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(sum.bits) : "f"(a32 + b32));
    return sum;
}

__device__ bfloat16 add(bfloat16 a, bfloat16 b)
{
    float const sum = __uint_as_float((unsigned)a.bits << 16) + __uint_as_float((unsigned)b.bits << 16);
    bfloat16 rounded;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(sum));
#else
    unsigned const bits = __float_as_uint(sum);
    rounded.bits = (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
    return rounded;
}

constexpr int PER_VECTOR = 16 / sizeof(ELEMENT);

union Vector {
    uint4 whole;
    ELEMENT element[PER_VECTOR];
    __device__ Vector() {}
};

__device__ uint4 add(uint4 a, uint4 b)
{
    Vector x, y, sum;
    x.whole = a;
    y.whole = b;
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) sum.element[i] = add(x.element[i], y.element[i]);
    return sum.whole;
}

#ifdef STREAMING
__device__ uint4 load(uint4 const* p) { return __ldcs(p); }
__device__ void store(uint4* p, uint4 value) { __stcs(p, value); }
#else
__device__ uint4 load(uint4 const* p) { return *p; }
__device__ void store(uint4* p, uint4 value) { *p = value; }
#endif

extern "C" __global__ void triad(
    uint4 const* __restrict__ x, uint4 const* __restrict__ dy, uint4* __restrict__ z, long long elements)
{
    long long const vectors = elements / PER_VECTOR;
    long long const i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < vectors) {
        store(z + i, add(load(x + i), load(dy + i)));
        return;
    }
    long long const element = vectors * PER_VECTOR + (i - vectors);
    if (element < elements) {
        ((ELEMENT*)z)[element] = add(((ELEMENT const*)x)[element], ((ELEMENT const*)dy)[element]);
    }
}
