// z = x + dy, the yardstick: two reads and one write of every element, and nothing else that a memory system could wait
// for. A kernel that reads x and dy and writes dx cannot be faster than this.
//
// Compile-time switches: ELEMENT, the element type; STREAMING 1: accesses ask to be evicted first.
// One thread adds one 16-byte vector; x, dy and z start at multiples of 16 bytes (CuPy allocates so). The elements after
// the last whole vector get a thread each: launch at least elements / kVector + elements % kVector threads.
#include "element.cuh"

using Element = ELEMENT;
template <class T> struct SumOf { using type = float; };
template <> struct SumOf<double> { using type = double; };
using Sum = typename SumOf<Element>::type;

constexpr int kVector = 16 / int(sizeof(Element));

template <int V> __device__ void add(const Element* x, const Element* dy, Element* z) {
    Packed<Element, V> a, b;
    if (STREAMING) {
        a.load_streaming(x);
        b.load_streaming(dy);
    } else {
        a.load(x);
        b.load(dy);
    }
    Sum values[V], others[V];
    a.unpack(values);
    b.unpack(others);
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] += others[i];
    a.pack(values);
    if (STREAMING) a.store_streaming(z);
    else a.store(z);
}

extern "C" __global__ void triad(const Element* __restrict__ x, const Element* __restrict__ dy, Element* __restrict__ z,
                                 int64 elements) {
    const int64 vectors = elements / kVector;
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < vectors) {
        add<kVector>(x + i * kVector, dy + i * kVector, z + i * kVector);
    } else if (const int64 element = vectors * kVector + (i - vectors); element < elements) {
        add<1>(x + element, dy + element, z + element);
    }
}
