// dw and db where there is little data, by blocks of their own: these go down the columns, while row walkers, if dx is
// wanted, write that alone in the same launch. Then x and dy are read twice, the second time mostly from the L2 cache, but no
// block waits for another, and no partial row goes through memory (of several blocks for a slice, its sums do).
//
// A block takes slices of columns, of kWideVector elements for each of its `column_threads`, and all rows of these,
// shared out among `row_threads`; a few threads may be left over. Of short rows, which make few slices of whole lines of memory,
// `row_parts` blocks share the rows of a slice; the last of them that is done adds up what they found. Order of a column's sum:
// kSummed of a thread's rows in turn (or what is left of kBatch), these in turn; then, in float64, every n-th thread in turn, and
// n lanes by a butterfly; then the parts in turn.
//
// Expects backward.cuh.
#pragma once

// Of the arguments, what a column block needs: so few that they stay in registers.
struct ColumnArguments {
    const X* x;
    const Dy* dy;
    const Compute *mean, *rstd;
    void *dw, *db;
    double* part_sums;  // of the slice's first part, where it has several; else null
    int64 x_row_stride, dy_row_stride;
    int rows;  // few, for each thread has few
    int columns, dw_code, row_threads, column_threads, column_blocks;
    int slice, part;          // the first slice, and which of its parts
    int first_row, row_step;  // of the block, and from one of a thread's rows to the next

    // Where slices have several parts a block has one of these, and no other slice.
    template <class Arguments>
    __device__ ColumnArguments(const Arguments& a, int block)
        : x(a.x), dy(a.dy), mean(a.mean), rstd(a.rstd), dw(a.dw), db(a.db), part_sums(nullptr), x_row_stride(a.x_row_stride),
          dy_row_stride(a.dy_row_stride), rows(a.rows), columns(a.columns), dw_code(a.dw_code), row_threads(a.row_threads),
          column_threads(a.column_threads), column_blocks(a.column_blocks), slice(block), part(0), first_row(0),
          row_step(a.row_threads) {
        if (a.row_parts == 1) return;
        slice = block / unsigned(a.row_parts);
        part = block - slice * a.row_parts;
        first_row = part * a.row_threads;
        row_step = a.row_parts * a.row_threads;
        part_sums = static_cast<double*>(a.sums) + slice * a.row_parts * entries();
    }
    __device__ int width() const { return column_threads * kWideVector; }  // of a slice
    __device__ int entries() const { return kWantDb && dw && db ? 2 * width() : width(); }  // sums of a slice, dw and db together

    __device__ void store(int entry, int column, double sum) const {
        store_element(dw && entry < width() ? dw : db, dw_code, column, sum);
    }
};

// On a multiprocessor of at most kThreads, which leave each the registers that it needs.
template <int kThreads> struct ColumnSlices {
    using WideX = Packed<X, kWideVector>;
    using WideDy = Packed<Dy, kWideVector>;

    // Rows that a thread adds up, and for which it waits together.
    static constexpr int kSummed = sizeof(WideX) + sizeof(WideDy) <= 32 ? 8 : 4;
    static constexpr int kBatch = kThreads <= 256 ? 2 * kSummed : kThreads <= 384 ? 3 * kSummed / 2 : kSummed;
    struct ThreadSums {
        Compute dw[kWideVector] = {}, db[kWideVector] = {};
    };

    // Where what a thread reads next lies.
    struct ThreadRow {
        const X* x;
        const Dy* dy;
        const Compute *rstd, *mean;

        // By additions, one after the other: the compiler would find all places of a batch from the first, by multiplications (an
        // H200, RMSNorm, 25 MB, N=4096 15.4 → 14.9 us, LayerNorm, 1536 16.7 → 16.3).
        __device__ void advance(const ColumnSlices& slices) {
            x += slices.x_step;
            dy += slices.dy_step;
            rstd += slices.a.row_step;
            asm volatile("" : "+l"(x), "+l"(dy), "+l"(rstd));
            if constexpr (kLayerNorm) {
                mean += slices.a.row_step;
                asm volatile("" : "+l"(mean));
            }
        }
    };

    const ColumnArguments& a;
    int width, entries;
    int stride;             // from one row thread's sums to the next in shared memory; the banks of neighbours differ
    int64 x_step, dy_step;  // from one of a thread's rows to the next

    __device__ explicit ColumnSlices(const ColumnArguments& a)
        : a(a), width(a.width()), entries(a.entries()), stride(entries + 16 / int(sizeof(Compute))),
          x_step(a.row_step * a.x_row_stride), dy_step(a.row_step * a.dy_row_stride) {}

    // By all threads of a column block.
    __device__ void sum(Compute* shared) const {
        for (int first = a.slice * width; first < a.columns; first += a.column_blocks * width) {
            sum_rows(first, shared);
            __syncthreads();
            add_threads(first, shared);
            __syncthreads();
        }
    }

private:
    __device__ void sum_rows(int first_column, Compute* shared) const {
        const int row_thread = threadIdx.x / unsigned(a.column_threads);
        if (row_thread >= a.row_threads) return;  // threads that are left over
        const int own = (threadIdx.x - row_thread * a.column_threads) * kWideVector, first_row = a.first_row + row_thread;
        ThreadSums sums;
        if (const int column = first_column + own; column < a.columns) {
            ThreadRow at = {a.x + first_row * a.x_row_stride + column, a.dy + first_row * a.dy_row_stride + column,
                            a.rstd + first_row, kLayerNorm ? a.mean + first_row : nullptr};
            // The same bits, by less code, for which few rows wait: an H100, LayerNorm, 1x128 5.6 → 5.1 us, 1x1024 5.8 → 5.6.
            if (a.rows <= a.row_step) {
                add_batch<1>(sums, first_row, at);
            } else {
                for (int row = first_row; row < a.rows; row += kBatch * a.row_step) add_batch<kBatch>(sums, row, at);
            }
        }
        Compute* target = shared + row_thread * stride + own;
        Packed<Compute, kWideVector> packed;
        if (a.dw) {
            packed.pack(sums.dw);
            packed.store(target);
            target += width;
        }
        if (kWantDb && a.db) {
            packed.pack(sums.db);
            packed.store(target);
        }
    }

    template <int kRows> __device__ void add_batch(ThreadSums& sums, int first_row, ThreadRow& at) const {
        WideX x_packed[kRows] = {};
        WideDy dy_packed[kRows] = {};
        RowStatistics statistics[kRows] = {};
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (first_row + i * a.row_step < a.rows) {
                x_packed[i].load_read_only(at.x);
                dy_packed[i].load_read_only(at.dy);
                statistics[i].rstd = __ldg(at.rstd);
                if constexpr (kLayerNorm) statistics[i].mean = __ldg(at.mean);
            }
            at.advance(*this);
        }
#pragma unroll
        for (int first = 0; first < kRows; first += kSummed) {
            if (first > 0 && first_row + first * a.row_step >= a.rows) return;
            ThreadSums part;
#pragma unroll
            for (int i = first; i < first + kSummed; ++i) {
                if (i >= kRows) break;  // known when compiled; as the loop's end it left the rows in memory on 10.0
                Compute x[kWideVector], dy[kWideVector];
                x_packed[i].unpack(x);
                dy_packed[i].unpack(dy);
#pragma unroll
                for (int v = 0; v < kWideVector; ++v) {
                    part.dw[v] += dy[v] * statistics[i].centred(x[v]) * statistics[i].rstd;
                    if constexpr (kWantDb) part.db[v] += dy[v];
                }
            }
#pragma unroll
            for (int v = 0; v < kWideVector; ++v) {
                sums.dw[v] += part.dw[v];
                if constexpr (kWantDb) sums.db[v] += part.db[v];
            }
        }
    }

    // `parts` lanes share a sum: a power of two of them, as many as there are threads for.
    __device__ void add_threads(int first_column, const Compute* shared) const {
        int log2_parts = minimum(5, log2_of(blockDim.x) - log2_of(entries));  // perhaps one too many
        if (log2_parts > 0 && entries << log2_parts > int(blockDim.x)) --log2_parts;
        if (log2_parts < 0) log2_parts = 0;
        const int parts = 1 << log2_parts;
        const int lanes = ((entries << log2_parts) + 31) / 32 * 32;  // whole warps
        for (int i = threadIdx.x; i < lanes; i += blockDim.x) {
            const int entry = i >> log2_parts, column = first_column + (entry < width ? entry : entry - width);
            const bool there = entry < entries;
            const int summed = there ? minimum(a.row_threads, a.rows - a.first_row) : 0;  // the other threads have no row
            double sum = 0;
#pragma unroll 4
            for (int k = i & (parts - 1); k < summed; k += parts) sum += shared[k * stride + entry];
            for (int distance = parts / 2; distance > 0; distance /= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            }
            if (there && (i & (parts - 1)) == 0 && column < a.columns) {
                if (a.part_sums) a.part_sums[a.part * entries + entry] = sum;
                else a.store(entry, column, sum);
            }
        }
    }
};

// By all threads of a column block. Not in line: what row walkers begin with stays short, and they keep the registers that they
// have.
template <int kThreads> __device__ __noinline__ void sum_columns(ColumnArguments a, Compute* shared) {
    ColumnSlices<kThreads>(a).sum(shared);
}

// By the last block that is done with its part of a slice: nobody waits for another. `counter` is the slice's, which the last
// leaves at zero. Apart from the above, whose registers this would take.
__device__ __noinline__ void add_parts(ColumnArguments a, unsigned* counter, int parts) {
    bool last = false;
    if (threadIdx.x == 0) {
        unsigned before;
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before) : "l"(counter), "r"(parts - 1) : "memory");
        last = before + 1 == parts;
    }
    if (!__syncthreads_or(last)) return;
    const int entries = a.entries();
    for (int entry = threadIdx.x; entry < entries; entry += blockDim.x) {
        const int column = a.slice * a.width() + (entry < a.width() ? entry : entry - a.width());
        if (column >= a.columns) continue;
        double sum = 0;
#pragma unroll 8
        for (int part = 0; part < parts; ++part) sum += a.part_sums[part * entries + entry];
        a.store(entry, column, sum);
    }
}
