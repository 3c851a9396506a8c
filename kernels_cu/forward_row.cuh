// A row of the forward pass, held in registers by the threads that share it: its statistics, and y.
//
// One exchange is enough for LayerNorm, too: a warp finds its own mean, and the squares of the distances from that, put together
// from those of its threads (forward.cuh). Orders of sums: over a thread's columns, over its lanes by a butterfly, over the warps
// and blocks likewise.
#pragma once

#include "forward.cuh"
#include "staged.cuh"

// A vector of a thread's x, until y is written: as it came; single columns widened, which takes less registers.
template <bool kWhole> struct KeptVector {
    Vector packed;
    __device__ void load(const X* source, Held held) {  // of an odd row (element.cuh) what is not held is read, too
        packed = {};
        if (kOddRows || held) packed.load(source);
        keep_held(packed, held);
    }
    __device__ void less(Compute origin, bool holds) { count_from(origin, packed, holds); }
    __device__ void unpack(Compute (&x)[kVector]) const {
        packed.unpack(x);
    }
};
template <> struct KeptVector<false> {
    Compute value;
    __device__ void load(const X* source, bool holds) {
        Vector packed;
        Compute x[kVector] = {Compute(0)};
        if (holds) {
            packed.load(source);
            packed.unpack(x);
        }
        value = x[0];
    }
    __device__ void less(Compute origin, bool holds) {
        if (kHasOrigin && holds) value -= origin;
    }
    __device__ void unpack(Compute (&x)[kVector]) const { x[0] = value; }
};
using Kept = KeptVector<(kVector > 1)>;

struct RowStatistics {
    Compute mean, rstd;  // the mean from the row's origin
};

// From a row's columns to its statistics. What warps post is the squares of the distances from the mean of their columns, and
// the columns' sum (RMSNorm: their squares, and 0). The exchange is SumExchange<false> of staged.cuh, or has what is used of it here.
template <class Exchange> struct RowMoments {
    static constexpr int kMost = kMaxWarps * kCluster;        // entries of a sum at most, one of each warp
    static constexpr int kLanes = minimum(kMost, 32);         // lanes that read these entries
    static constexpr int kEach = kMost / kLanes;              // entries that a lane reads

    const Exchange& exchange;
    const RootOfMean root;
    const ThreadPart part;
    Compute reciprocal_columns, reciprocal_warp_columns;
    Compute entry_columns[kEach], reciprocal_entry_columns[kEach];  // of the warps whose entries this lane reads; 0: no such warp

    __device__ RowMoments(const ForwardArguments& a, const Columns& own, const Exchange& exchange)
        : exchange(exchange), root(a.eps), part([&](int k) { return own.holds(k); }),
          reciprocal_columns(Compute(1) / Compute(a.columns)) {
        const int span = exchange.lanes * kColumnsPerThread;  // of the group's lanes in a warp
        reciprocal_warp_columns = reciprocal(kOddRows ? own.end - own.begin : columns_in(own.end - own.begin, span));
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int entry = i * kLanes + threadIdx.x % kLanes;
            const int block = kClustered ? entry / exchange.warps : 0, warp = entry - block * exchange.warps;
            const int slab = minimum(a.slab_columns, a.columns - block * a.slab_columns);
            const WarpColumns odd(slab, exchange.warps, warp);
            const int columns_of_warp = kOddRows ? odd.end - odd.begin : columns_in(slab - warp * span, span);
            const int columns = entry < exchange.entries ? columns_of_warp : 0;
            entry_columns[i] = Compute(columns);
            reciprocal_entry_columns[i] = reciprocal(columns);
        }
    }

    // `held` is of an odd row, and has 16 bits for each column of a pair.
    __device__ Sums<Compute> of_warp(const Kept (&row)[kVectors], const Columns& at, const PairsHeld& held) const {
        return moments_of(part, at, reciprocal_warp_columns, [&](int k, Compute (&x)[kVector]) { row[k].unpack(x); },
                          [&](int k) { return held.of(k, at.holds(k)); },
                          [&](Sums<Compute>& sums) { exchange.sum_in_warp(sums); });
    }

    __device__ RowStatistics of_row(int j, const Sums<Compute>& posted) const {
        Compute sum = posted.second, squares = posted.first;
        if (!kOneWarp && exchange.entries > 1) {
            const Sums<Compute>* const entries = exchange.wait(j);
            const auto entry = [&](int i) {
                const Sums<Compute> read = entries[minimum(i * kLanes + int(threadIdx.x % kLanes), exchange.entries - 1)];
                return entry_columns[i] > Compute(0) ? read : Sums<Compute>{Compute(0), Compute(0)};
            };
            if constexpr (kLayerNorm) sum = sum_of_entries([&](int i) { return entry(i).second; });
            const Compute mean = mean_of(sum, reciprocal_columns);
            squares = sum_of_entries([&](int i) {
                const Sums<Compute> own = entry(i);
                if constexpr (!kLayerNorm) return own.first;
                const Compute apart = fused(-entry_columns[i], mean, own.second);  // its mean less the row's, times its columns
                return fused(apart * reciprocal_entry_columns[i], apart, own.first);
            });
        }
        return {kLayerNorm ? mean_of(sum, reciprocal_columns) : Compute(0), root.reciprocal(squares * reciprocal_columns)};
    }

private:
    template <class Term> __device__ static Compute sum_of_entries(Term term) {
        Sums<Compute> sum = {Compute(0), Compute(0)};
#pragma unroll
        for (int i = 0; i < kEach; ++i) sum.first += term(i);
        sum_over_lanes<false, kLanes>(sum);
        return sum.first;
    }
    __device__ static Compute reciprocal(int columns) { return columns ? Compute(1) / Compute(columns) : Compute(0); }
    __device__ static int columns_in(int left, int span) { return left < 0 ? 0 : minimum(left, span); }
};

// y of a vector of x.
__device__ inline Vector normalized(const Kept& kept, const RowStatistics& row, const Compute (&w)[kVector],
                                    const Compute (&b)[kVector]) {
    Compute x[kVector];
    kept.unpack(x);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
        const Compute centred = kLayerNorm ? x[v] - row.mean : x[v];
        x[v] = centred * row.rstd * w[v] + b[v];
    }
    Vector packed;
    packed.pack(x);
    return packed;
}
