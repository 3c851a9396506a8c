// Overlapping the launch of one kernel with the run of the one before (compute capability 9.0 and newer).
#pragma once

// The next kernel in the stream may be launched from now on, if it asked for that.
__device__ inline void let_next_kernel_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until all blocks of the kernel before have ended and their writes can be seen.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
