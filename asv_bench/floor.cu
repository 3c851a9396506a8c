// The final reduction without what comes before it: each block writes a partial row of ones, meets the others, and takes its
// share. What it does is cut short after `last`.
#include "reduction.cuh"

enum Step : int { kNothing, kStarted, kMet, kAddedUp };

struct FloorArguments {
    float *dw_partials, *db_partials;
    void *dw, *db;  // null: not wanted
    Meeting* meeting;
    int columns, partial_rows, row_threads, dw_code, last, unused;
};

extern "C" __global__ void __launch_bounds__(256) floor_of_reduction(const FloorArguments a) {
    extern __shared__ __align__(128) char shared[];
    if (a.last == kNothing) return;
    a.meeting->start();
    Attendance attendance;
    if (threadIdx.x == 0) {  // so that nobody leaves
        do attendance.look(*a.meeting);
        while (!attendance.stays());
    }
    __syncthreads();
    if (a.last > kStarted) {
        for (int output = 0; output < (a.db ? 2 : 1); ++output) {
            float* const row = (output ? a.db_partials : a.dw_partials) + blockIdx.x * partial_row_stride(a.columns);
            const float ones[4] = {1, 1, 1, 1};
            Packed<float, 4> packed;
            packed.pack(ones);
            for (int column = 4 * threadIdx.x; column < a.columns; column += 4 * blockDim.x) packed.store(row + column);
        }
    }
    attendance.arrive(*a.meeting);
    if (a.last == kAddedUp) reduce_partials<kReductionBatch, 0, float>(a, attendance, shared, 0, a.columns);
    else if (a.last == kMet) meet(*a.meeting, attendance);
    else if (threadIdx.x == 0 && int(attendance.arrived) == gridDim.x) {
        Meeting::write(a.meeting->before, attendance.before + attendance.arrived);  // as the last to arrive does
    }
}
