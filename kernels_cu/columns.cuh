// Which columns of a row, or of a block's slab of it, a thread holds.
//
// Expects Compute, kVector, kVectors and kColumnsPerThread, their product.
#pragma once

#include "element.cuh"

// With more columns a thread than this a row takes whole warps; with these it may take a part of one.
constexpr bool kWholeWarps = kColumnsPerThread > (sizeof(Compute) == 8 ? 8 : 16);

// With more columns than these a thread has no register to spare, and its block little shared memory.
constexpr bool kManyColumns = kColumnsPerThread * int(sizeof(Compute)) > 160;

// One thread's columns: `kVectors` vectors. A warp's columns follow one another, and it reads consecutive memory. Where the
// row ends early, a thread holds fewer, or none.
struct Columns {
    int first, count, lanes;

    __device__ Columns(int thread, int threads, int columns) : count(columns), lanes(minimum(threads, 32)) {
        first = thread / lanes * (lanes * kColumnsPerThread) + thread % lanes * kVector;
    }
    // From one vector to the next: known when compiled, where a row takes whole warps.
    __device__ int step() const { return kWholeWarps ? 32 * kVector : lanes * kVector; }
    __device__ int at(int vector) const { return first + vector * step(); }
    __device__ bool holds(int vector) const { return at(vector) < count; }
    // The same, but found anew where it is used: kept over the rows, the places of all of a thread's single columns, or of
    // many, would fill its registers.
    __device__ Columns found_anew() const {
        Columns copy = *this;
        if constexpr (kVector == 1 || kManyColumns) asm volatile("" : "+r"(copy.first));
        return copy;
    }
    // A column that can be read in any case, `other` where the thread has none: work on it is wasted, but needs no branch.
    __device__ int readable(int vector, int other) const { return holds(vector) ? at(vector) : other; }
};
