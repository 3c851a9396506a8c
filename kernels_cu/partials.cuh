// How partial rows of dw and db lie in memory: what the backward kernels leave for the final reduction.
#pragma once

#include "element.cuh"

// Elements from one partial row to the next: every row starts at a multiple of 16 bytes.
__device__ constexpr int64 partial_row_stride(int columns) { return (columns + 3) / 4 * 4; }
