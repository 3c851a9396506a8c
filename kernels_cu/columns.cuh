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

// With more columns a thread than these a row takes whole warps, with these or fewer a warp or a part of one. PART_OF_WARP n: it
// takes n lanes, however many columns a thread has (known when compiled: LayerNorm, N=257, 1 GB, 293 → 267 us, forward 200 → 186).
#ifndef PART_OF_WARP
#define PART_OF_WARP 0
#endif
constexpr bool kWholeWarps = !PART_OF_WARP && kColumnsPerThread > (sizeof(Compute) == 8 ? 8 : 16);

// Lanes of a warp that share a row, of so many threads that do.
__device__ inline int lanes_of(int threads) { return PART_OF_WARP ? PART_OF_WARP : minimum(threads, 32); }

// With more columns than these, as forward kernels may have, a thread has no register to spare.
constexpr bool kManyColumns = kColumnsPerThread * int(sizeof(Compute)) > 160;

// 1: some block has fewer columns of a row than one of its warps would read. Backward; forward kernels ask in any case.
#ifndef SHORT_ROWS
#define SHORT_ROWS 0
#endif

// Off 16 bytes, of whole warps: a question for each access, whether it is there, would cost as much as the work on it.
constexpr bool kReadsAll = !VECTOR && kWholeWarps && !SHORT_ROWS && !kOddRows;

// Of an odd row all of a thread's pairs are columns that its warp has but, perhaps, in the first pair and in the last ones: so the
// columns a thread are chosen (short_row() and staged_threads() of config/common.py, by odd_span()). Which of these are, PairsHeld says.
constexpr int kLastPairs = kWholeWarps ? 3 : 2;
static_assert(!kOddRows || (kVector == 2 && kVectors > kLastPairs && !GANG), "pairs, of which most are full");

// What one of the warps that share a row, or a block's slab of it, has of an odd row's columns: whole pairs, as many as the others or
// one more, so that all are nearly full. It reads and sums them as if they were a row: where a shifted row's pairs lie across the
// ends of two warps' columns both read these, each for its own column, and no order of sums hangs on where the row starts.
struct WarpColumns {
    int begin, end;

    __device__ WarpColumns(int columns, int warps, int warp) {
        const int pairs = (columns + 1) / 2, each = pairs >> log2_of(warps), rest = pairs - (each << log2_of(warps));
        begin = 2 * (warp * each + minimum(warp, rest));
        end = minimum(begin + 2 * (each + (warp < rest)), columns);
    }
};

// A thread's sum over its columns is one chain of additions; of an odd row two, of the first columns of pairs and of the second.
constexpr int kChains = kOddRows ? 2 : 1;

// Columns of w and b are loaded so many at a time: off 16 bytes one by one, wherever they start.
constexpr int kLoaded = VECTOR ? kVector : 1;
template <class C, int K> __device__ C (&as_loaded(C (&values)[K][kVector]))[K * kVector / kLoaded][kLoaded] {
    return reinterpret_cast<C(&)[K * kVector / kLoaded][kLoaded]>(values);
}
// Whether a thread has a column of a vector.
template <class At> __device__ bool holds_column(const At& own, int vector, int v) {
    if constexpr (kOddRows) return own.at(vector) + v >= own.begin && own.at(vector) + v < own.end;
    else return own.holds(vector);
}
// Where load i of a thread's begins, -1 where it has no such column. Of Columns, or what else has holds() and at().
template <class At> __device__ int loaded_column(const At& own, int i) {
    const int vector = i * kLoaded / kVector, v = i * kLoaded % kVector;
    return holds_column(own, vector, v) ? own.at(vector) + v : -1;
}

// One thread's columns: `kVectors` vectors. A warp's columns follow one another, and it reads consecutive memory. Where the
// row ends early, a thread holds fewer, or none. With kReadsAll the last warps then start earlier, if the row is long
// enough: all that a warp would read is there, some of it held by the warp before.
struct Columns {
    int first, lanes;
    int begin;    // of the columns that the lanes hold together
    int end;      // of these, of an odd row; else of the row, or the slab
    int skipped;  // of the thread's vectors, those before them
    int shift;    // kShifts: of one column, where the row starts at an odd element: first is then begin - 1, begin + 1, …

    __device__ Columns(int thread, int threads, int columns, int shift = 0)
        : lanes(kWholeWarps ? 32 : lanes_of(threads)), end(columns), skipped(0), shift(shift) {
        const int span = lanes * kColumnsPerThread, warp = thread >> log2_of(lanes);
        begin = warp * span;
        if constexpr (kOddRows && kWholeWarps) {
            const WarpColumns own(columns, threads / 32, warp);
            begin = own.begin;
            end = own.end;
        }
        first = (thread & (lanes - 1)) * kVector + (kReadsAll && columns >= span ? minimum(begin, columns - span) : begin);
        if constexpr (kShifts) first -= shift;
        if constexpr (kReadsAll) skipped = (begin - first + 32 * kVector - 1) / (32 * kVector);
    }
    // From one vector to the next: known when compiled, where a row takes whole warps.
    __device__ int step() const { return kWholeWarps ? 32 * kVector : lanes * kVector; }
    // From the first to this one.
    __device__ int offset(int vector) const { return vector * step(); }
    __device__ int at(int vector) const { return first + offset(vector); }
    __device__ bool holds(int vector) const { return at(vector) < end && vector >= skipped; }
    // The same, but not shifted.
    __device__ Columns in_order() const {
        Columns copy = *this;
        copy.shift = 0;
        if constexpr (kShifts) copy.first += shift;
        return copy;
    }
    // The same, but so many columns earlier.
    __device__ Columns begun_earlier(int columns) const {
        Columns copy = *this;
        copy.first -= columns;
        return copy;
    }
    // The same, but found anew where it is used: kept over the rows, the places of all of a thread's columns off 16 bytes, or of
    // many, would fill its registers.
    __device__ Columns found_anew() const {
        Columns copy = *this;
        if constexpr (!VECTOR || kManyColumns) asm volatile("" : "+r"(copy.first), "+r"(copy.skipped));
        return copy;
    }
    // A column that can be read in any case, `other` where the thread has none: work on it is wasted, but needs no branch.
    __device__ int readable(int vector, int other) const { return holds(vector) ? at(vector) : other; }
};

// Whether a row's pairs begin one element before it.
template <class T> __device__ int shift_of_row(const T* row) {
    return kShifts ? unsigned(reinterpret_cast<unsigned long long>(row)) / sizeof(T) & 1 : 0;
}

// Which halves of an odd row's pair `vector` are columns that the thread has.
struct PairsHeld {
    unsigned first, last[kLastPairs];

    __device__ explicit PairsHeld(const Columns& own) : first(~0u) {
        if constexpr (kOddRows) {
            const auto held = [&](int vector) {
                return (holds_column(own, vector, 0) ? 0xffffu : 0u) | (holds_column(own, vector, 1) ? 0xffff0000u : 0u);
            };
            if constexpr (kShifts) first = held(0);
#pragma unroll
            for (int i = 0; i < kLastPairs; ++i) last[i] = held(kVectors - kLastPairs + i);
            asm volatile("" : "+r"(first));  // found here, once
#pragma unroll
            for (int i = 0; i < kLastPairs; ++i) asm volatile("" : "+r"(last[i]));
        }
    }
    __device__ unsigned of(int vector) const {
        const int i = vector - (kVectors - kLastPairs);
        return i >= 0 ? last[i] : kShifts && vector == 0 ? first : ~0u;
    }
    // Of any row, where `holds` says whether the thread has the vector.
    __device__ Held of(int vector, bool holds) const { return kOddRows ? Held(of(vector)) : Held(holds); }
};

// Writes a thread's vectors of a row, one after the other. An odd row's pairs are written as words, with kShifts, where the thread has
// both columns. Beside these it has at most the second column of its first pair, and the first of one of its last, which is written
// in the end: a branch for each pair that may be such took a tenth of a row's instructions (1 GB, N=12289, 278 → 254 us).
//
// With kCrosses the row may begin at another half of a word than the one that was read: then each word holds the second column of
// one pair and the first of the next, whose lane writes both.
struct RowWriter {
    static constexpr bool kCrosses = ODD_ROWS == 2;

    PairsHeld held;  // of what is written
    int single;      // from the thread's first column to the one that it has of a last pair; -1: it has both, or none
    unsigned pair;   // which that is in
    int crosses, lane, lanes;
    unsigned before;

    // `read` is of the pairs as they are read, `row` one of the group's rows, that are to be written.
    template <class T>
    __device__ RowWriter(const Columns& own, const PairsHeld& read, const T* row)
        : held(read), single(-1), pair(0), crosses(kCrosses ? shift_of_row(row) ^ own.shift : 0),
          lane(threadIdx.x & (own.lanes - 1)), lanes(own.lanes), before(0) {
        if constexpr (kCrosses) held = PairsHeld(own.begun_earlier(crosses));
        if constexpr (kShifts) {
#pragma unroll
            for (int i = 0; i < kLastPairs; ++i) {
                if (held.last[i] == 0xffffu) single = own.offset(kVectors - kLastPairs + i);
            }
            asm volatile("" : "+r"(single));  // found here, once
        }
    }
    // Where the thread's first vector begins, as what is written has them, of a row that begins there.
    template <class T> __device__ T* begin(T* row, const Columns& own) const { return row + own.first - crosses; }
    // `first` is what begin() found; `active` says whether the row is there, `holds` whether the thread has the vector (of an odd row
    // `held` says that). With kCrosses by all lanes of a warp.
    template <bool kStreaming, class T, class V>
    __device__ void put(T* first, const Columns& at, int k, V packed, bool active, bool holds) {
        if constexpr (kCrosses) {
            const unsigned from = __shfl_sync(0xffffffffu, packed.words[0], threadIdx.x + lanes - 1, lanes);
            const unsigned previous = lane == 0 ? before : from;
            before = from;
            packed.words[0] = __byte_perm(previous, packed.words[0], crosses ? 0x5432 : 0x7654);
        }
        T* const target = first + at.offset(k);
        const Held own = active ? held.of(k, holds) : Held(0);
        if constexpr (!kShifts) {
            store_held<kStreaming>(packed, target, own);
        } else {
            store_held<kStreaming>(static_cast<const Packed<T, 2>&>(packed), target, own == ~0u);
            if (k == 0 && own == 0xffff0000u) target[1] = packed.second();
            if (k >= kVectors - kLastPairs && held.of(k) == 0xffffu) pair = packed.words[0];
        }
    }
    // When all of a row have been put; with kCrosses the last lane's second column of its last pair, too.
    template <class T> __device__ void finish(T* first, const Columns& at, bool active) const {
        if constexpr (kShifts) {
            if (active && single >= 0) first[single] = {(unsigned short)(pair & 0xffffu)};
        }
        if constexpr (kCrosses) {
            const int place = at.offset(kVectors);
            const bool has = crosses && lane == 0 && at.first + place <= at.end;
            if (active && has) first[place] = {(unsigned short)(before >> 16)};
        }
    }
};

// The sum of a thread's chains, the same whether its row is shifted or not. Where it is the first columns of pairs are the second
// ones of the pairs before: those of the next lane, which the last finds in the first.
template <bool kBoth, class S, int kCount> __device__ S sum_chains(const S (&sums)[kCount], const Columns& own) {
    S sum = sums[0];
    if constexpr (kShifts) sum.template take_from_lane<kBoth>(threadIdx.x + own.shift, own.lanes);
    if constexpr (kOddRows) sum.add(sums[1]);
    return sum;
}
