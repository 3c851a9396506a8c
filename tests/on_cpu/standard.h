// What cuda.h needs of the system: a file of its own, compiled once for all kernels.
#pragma once

#include <setjmp.h>
#include <ucontext.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
