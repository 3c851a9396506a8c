// Which columns of a row, or of a block's slab of it, a thread holds.
//
// Expects Compute, kVector, kVectors and kColumnsPerThread, their product.
#pragma once

#include "element.cuh"

// Blocks that share a row: those of a cluster, or of a gang (staged.cuh says more). All but the staged kernels' have whole rows.
#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef GANG
#define GANG 0
#endif

// With more columns a thread than these a row takes whole warps, unless compiled with PART_OF_WARP; with these or fewer it
// takes a warp or a part of one.
#ifndef PART_OF_WARP
#define PART_OF_WARP 0
#endif
constexpr bool kWholeWarps = !PART_OF_WARP && kColumnsPerThread > (sizeof(Compute) == 8 ? 8 : 16);

// With more columns than these, as forward kernels may have, a thread has no register to spare.
constexpr bool kManyColumns = kColumnsPerThread * int(sizeof(Compute)) > 160;

// 1: some block has fewer columns of a row than one of its warps would read. Backward; forward kernels ask in any case.
#ifndef SHORT_ROWS
#define SHORT_ROWS 0
#endif

// Off 16 bytes, of whole warps: a question for each access, whether it is there, would cost as much as the work on it.
constexpr bool kReadsAll = !VECTOR && kWholeWarps && !SHORT_ROWS;

// Single columns of rows of which a warp has several, one behind the other in shared memory. If these begin in the same banks, as
// four of N=129 do, 258 bytes apart, they are turned: a row's lanes begin some quarters of their columns later than those of the row
// before, and end with the first. What is summed over quarters, and then over quarters that lie two apart, has the same bits
// whatever the turn. An H100, N=129, 1 GB: on eight lanes 491 → 426 us, LayerNorm 505 → 438, on sixteen, with 12 columns, 471, 518.
#ifndef TURN_ROWS
#define TURN_ROWS 0
#endif
constexpr bool kTurns = TURN_ROWS;
static_assert(!kTurns || (kVector == 1 && !kWholeWarps && kColumnsPerThread % 4 == 0), "a thread's columns make four quarters");
constexpr int kQuarter = kTurns ? kVectors / 4 : kVectors;

// Columns of w and b are loaded so many at a time: off 16 bytes one by one, wherever they start.
constexpr int kLoaded = VECTOR ? kVector : 1;
template <class C, int K> __device__ C (&as_loaded(C (&values)[K][kVector]))[K * kVector / kLoaded][kLoaded] {
    return reinterpret_cast<C(&)[K * kVector / kLoaded][kLoaded]>(values);
}
// Where load i of a thread's begins, -1 where it has no such column. Of Columns, or what else has holds() and at().
template <class At> __device__ int loaded_column(const At& own, int i) {
    const int vector = i * kLoaded / kVector;
    return own.holds(vector) ? own.at(vector) + i * kLoaded % kVector : -1;
}

// One thread's columns: `kVectors` vectors. A warp's columns follow one another, and it reads consecutive memory. Where the
// row ends early, a thread holds fewer, or none. With kReadsAll the last warps then start earlier, if the row is long
// enough: all that a warp would read is there, some of it held by the warp before.
struct Columns {
    int first, count, lanes;
    int begin;    // of the columns that the lanes hold together
    int skipped;  // of the thread's vectors, those before them
    int turn;     // kTurns: quarters

    __device__ Columns(int thread, int threads, int columns, int turn = 0)
        : count(columns), lanes(kWholeWarps ? 32 : minimum(threads, 32)), skipped(0), turn(turn) {
        const int span = lanes * kColumnsPerThread;
        begin = (thread >> log2_of(lanes)) * span;
        first = (thread & (lanes - 1)) * kVector + (kReadsAll && columns >= span ? minimum(begin, columns - span) : begin);
        if constexpr (kReadsAll) skipped = (begin - first + 32 * kVector - 1) / (32 * kVector);
    }
    // From one vector to the next: known when compiled, where a row takes whole warps.
    __device__ int step() const { return kWholeWarps ? 32 * kVector : lanes * kVector; }
    // From the first to this one.
    __device__ int offset(int vector) const {
        if constexpr (!kTurns) return vector * step();
        else return (((vector / kQuarter + turn) & 3) * kQuarter + vector % kQuarter) * step();
    }
    __device__ int at(int vector) const { return first + offset(vector); }
    __device__ bool holds(int vector) const { return at(vector) < count && vector >= skipped; }
    // The same, but found anew where it is used: kept over the rows, the places of all of a thread's single columns, or of
    // many, would fill its registers.
    __device__ Columns found_anew() const {
        Columns copy = *this;
        if constexpr (!VECTOR || kManyColumns) asm volatile("" : "+r"(copy.first), "+r"(copy.skipped));
        return copy;
    }
    // A column that can be read in any case, `other` where the thread has none: work on it is wasted, but needs no branch.
    __device__ int readable(int vector, int other) const { return holds(vector) ? at(vector) : other; }
};

// Of this thread's row, where each of a warp's rows is turned by so many quarters more than the one before.
__device__ inline int turn_of_row(int quarters, int lanes) {
    return kTurns ? ((threadIdx.x & 31) >> log2_of(lanes)) * quarters & 3 : 0;
}

// The sums of a thread's quarters: an order that no turn changes.
template <class S, int kCount> __device__ S sum_quarters(const S (&sums)[kCount]) {
    S sum = sums[0];
    if constexpr (kCount == 4) {
        S other = sums[1];
        sum.add(sums[2]);
        other.add(sums[3]);
        sum.add(other);
    }
    return sum;
}
