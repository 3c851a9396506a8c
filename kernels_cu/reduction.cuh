// The final reduction: dw and db from the partial rows that the row walkers left in memory, by the blocks that wrote them,
// in the same launch. Slices of columns are shared out among the blocks; a column's sum has the same order whoever adds
// it up: a thread takes row number row_threads, 2·row_threads, … on from its own, of four columns; then lanes of a warp
// by a butterfly, warps in order. All in float64, so that dw and db are rounded once here. A single walker's partial row
// is the sum itself: dw and db, or what is narrowed to them.
//
// No block waits for one that has not started, which may have to wait itself, for multiprocessors that other kernels hold.
// A block that has written its partial row, and sees that all others have started, waits until they have arrived, too.
// Else it says that it leaves, and leaves. Those that stayed do all the work; if none stayed, the last to arrive does.
#pragma once

#include "counters.cuh"
#include "element.cuh"

// Elements from one partial row to the next: every row starts at a multiple of 16 bytes.
__device__ constexpr int64 partial_row_stride(int columns) { return (columns + 3) / 4 * 4; }

// Where the blocks of a launch meet. It was zero before the first launch that uses it; launches that do follow one another.
struct Meeting {
    using Word = unsigned long long;

    StepCounter counters[kStepCounters];
    Word before;   // `arrived`, as the launch finds it
    Word started;  // blocks
    Word arrived;  // lower half: blocks; upper half: those among them that said they leave
    Word left[1];  // of each block in turn: mark() of the last launch in which it said so

    __device__ static Word read(const Word& word) {
        Word value;
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(&word) : "memory");
        return value;
    }
    __device__ static Word read_acquiring(const Word& word) {
        Word value;
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(&word) : "memory");
        return value;
    }
    __device__ static void write(Word& word, Word value) {
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&word), "l"(value) : "memory");
    }
    __device__ static Word mark(Word before) { return before + 1; }

    // By each block, first of all.
    __device__ void start() {
        if (threadIdx.x == 0) asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(&started) : "memory");
    }
};

// What thread 0 of a block knows of the meeting.
struct Attendance {
    Meeting::Word before, started, arrived;

    // Some time before arriving.
    __device__ void look(const Meeting& meeting) {
        if (threadIdx.x != 0) return;
        before = Meeting::read(meeting.before);
        started = Meeting::read(meeting.started);
    }
    // Whether all blocks of the launch had started then.
    __device__ bool stays() const { return int(unsigned(started) - unsigned(before)) == int(gridDim.x * gridDim.y); }
    // By all threads of a block, once its partial row is written.
    __device__ void arrive(Meeting& meeting) {
        __syncthreads();
        if (threadIdx.x != 0) return;
        if (!stays()) Meeting::write(meeting.left[blockIdx.y * gridDim.x + blockIdx.x], Meeting::mark(before));
        const Meeting::Word step = stays() ? 1 : 1 + (Meeting::Word(1) << 32);
        asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                     : "=l"(arrived) : "l"(&meeting.arrived), "l"(step) : "memory");
        arrived += step - before;
    }
};

// A block at the meeting's end: number `rank` of the `size` blocks that share the work; of none where size is 0.
struct Crew {
    int rank, size;
};

// By all threads of a block that has arrived.
__device__ inline Crew meet(Meeting& meeting, const Attendance& attendance) {
    using Word = Meeting::Word;
    __shared__ Word shared_before;
    __shared__ int shared_left;
    const int blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x;
    bool works = false;
    if (threadIdx.x == 0) {
        const Word before = attendance.before;
        Word arrived = attendance.arrived;
        const bool last = int(arrived) == blocks;
        if (last) Meeting::write(meeting.before, before + arrived);  // for the next launch; all of this one have read it
        if (attendance.stays()) {
            while (int(arrived) != blocks) arrived = Meeting::read_acquiring(meeting.arrived) - before;
        }
        shared_before = before;
        shared_left = int(arrived >> 32);
        works = attendance.stays() || (last && shared_left == blocks);
    }
    if (!__syncthreads_or(works)) return {0, 0};
    if (shared_left == 0) return {block, blocks};
    if (shared_left == blocks) return {0, 1};
    int lower_left = 0;
    for (int first = 0; first < block; first += blockDim.x) {
        const int other = first + threadIdx.x;
        const bool left = other < block && Meeting::read(meeting.left[other]) == Meeting::mark(shared_before);
        lower_left += __syncthreads_count(left);
    }
    return {block - lower_left, blocks - shared_left};
}

constexpr int kReductionRun = 4;     // columns of a thread
constexpr int kReductionBatch = 10;  // partial rows for which it waits together, where registers allow it

// A thread's partial rows of its columns, from row `first` on; for kBatch of them it waits together.
template <int kBatch, class Arguments, class C>
__device__ void add_partials(double (&sums)[kReductionRun], const Arguments& a, const C* partials, int first) {
    const int64 stride = partial_row_stride(a.columns);
    for (; first < a.partial_rows; first += kBatch * a.row_threads) {
        Packed<C, kReductionRun> packed[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = first + i * a.row_threads;
            packed[i] = {};
            if (row < a.partial_rows) packed[i].load(partials + row * stride);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            double values[kReductionRun];
            packed[i].unpack(values);
#pragma unroll
            for (int j = 0; j < kReductionRun; ++j) sums[j] += values[j];
        }
    }
}

// The partial rows and the result of one output: of db after those of dw, where both are wanted.
template <class C> struct Output {
    const C* partials;
    void* target;

    template <class Arguments>
    __device__ Output(const Arguments& a, bool second)
        : partials(a.dw && !second ? a.dw_partials : a.db_partials), target(a.dw && !second ? a.dw : a.db) {}
};

// A slice's columns, of whose sums each thread has a part: these are added up and stored, by all threads of the block.
// `scratch` has room for 32 bytes a thread.
template <class C, class Arguments>
__device__ void add_row_threads(double (&sums)[kReductionRun], const Arguments& a, const Output<C>& output, int first_column,
                                int column_threads, double* scratch) {
    const int slice_columns = column_threads * kReductionRun, row_thread = threadIdx.x >> log2_of(column_threads);
    const int own = (threadIdx.x & (column_threads - 1)) * kReductionRun;
    const int lane_rows = column_threads < 32 ? 32 >> log2_of(column_threads) : 1;  // of which one goes on
    if (row_thread < a.row_threads) {
        for (int distance = 16; distance >= column_threads; distance /= 2) {
#pragma unroll
            for (int j = 0; j < kReductionRun; ++j) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], distance);
        }
        if ((row_thread & (lane_rows - 1)) == 0) {
            double* const entry = scratch + (row_thread >> log2_of(lane_rows)) * slice_columns + own;
#pragma unroll
            for (int j = 0; j < kReductionRun; ++j) entry[j] = sums[j];
        }
    }
    __syncthreads();
    for (int column = threadIdx.x; column < slice_columns; column += blockDim.x) {
        if (first_column + column >= a.columns) break;
        double sum = scratch[column];
#pragma unroll 4
        for (int i = 1; i < a.row_threads >> log2_of(lane_rows); ++i) sum += scratch[i * slice_columns + column];
        store_element(output.target, a.dw_code, first_column + column, sum);
    }
    __syncthreads();
}

// Where one block takes all rows, or one for each slab of columns, its partial row is the sum: dw and db are the same
// numbers in a type of their own. By all threads of the block, of its columns; for kTogether of them a thread waits together.
template <int kTogether, class C, class Arguments>
__device__ void narrow_partial_row(const Arguments& a, int first_column, int columns) {
    __syncthreads();
#pragma unroll 1
    for (int second = 0; second < 2; ++second) {
        const C* const partials = second ? a.db_partials : a.dw_partials;
        void* const target = second ? a.db : a.dw;
        if (!partials || !target) continue;
#pragma unroll 1
        for (int first = threadIdx.x; first < columns; first += kTogether * blockDim.x) {
            C values[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int column = first + i * blockDim.x;
                if (column < columns) values[i] = partials[first_column + column];
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int column = first + i * blockDim.x;
                if (column < columns) store_element(target, a.dw_code, first_column + column, values[i]);
            }
        }
    }
}

// By all threads of all blocks, when they have arrived, each with the columns that it holds: `shared` has 32 bytes for each
// thread, of which nothing is needed any more. A thread loads kBatch partial rows together, and kTogether columns where it narrows
// a single one; 0: that never happens.
template <int kBatch, int kTogether, class C, class Arguments>
__device__ void reduce_partials(const Arguments& a, const Attendance& attendance, void* shared, int own_first_column,
                                int own_columns) {
    if (!a.meeting) {
        if constexpr (kTogether > 0) {
            if (a.dw_partials || a.db_partials) narrow_partial_row<kTogether, C>(a, own_first_column, own_columns);
        }
        return;
    }
    const Crew crew = meet(*a.meeting, attendance);
    if (crew.size == 0) return;
    // A slice is what a block's threads take at a time or, where no threads share a column, what each of them takes: of a
    // power of two of threads and columns, so that shifts and masks do for divisions.
    const bool alone = a.row_threads == 1;
    const int column_threads = alone ? 1 : (1 << log2_of(blockDim.x)) >> log2_of(a.row_threads);
    const int slice_columns = column_threads * kReductionRun;
    const int slices = (a.columns + slice_columns - 1) >> log2_of(slice_columns), outputs = a.dw && a.db ? 2 : 1;
    const int row_thread = alone ? 0 : threadIdx.x >> log2_of(column_threads);
    const int own = (threadIdx.x & (column_threads - 1)) * kReductionRun;
    const int first = alone ? crew.rank * blockDim.x + threadIdx.x : crew.rank;
    for (int i = first; i < slices * outputs; i += alone ? crew.size * blockDim.x : crew.size) {
        const Output<C> output(a, i >= slices);
        const int first_column = (i < slices ? i : i - slices) * slice_columns;
        double sums[kReductionRun] = {};
        if (row_thread < a.row_threads && first_column + own < a.columns) {  // some threads may be left over
            add_partials<kBatch>(sums, a, output.partials + first_column + own, row_thread);
        }
        if (alone) {
            for (int j = 0; j < minimum(kReductionRun, a.columns - first_column); ++j) {
                store_element(output.target, a.dw_code, first_column + j, sums[j]);
            }
        } else {
            add_row_threads(sums, a, output, first_column, column_threads, static_cast<double*>(shared));
        }
    }
}
