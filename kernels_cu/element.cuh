// Element types, their conversions, and packed vectors that move in accesses of up to 16 bytes.
//
// No CUDA header is included anywhere in kernels_cu/: NVRTC then compiles a kernel several times faster. Sixteen-bit
// floats are therefore structs around their bits, converted by the hardware's own instructions.
#pragma once

using int64 = long long;

struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };
using float32 = float;
using float64 = double;

// The type of the arithmetic on elements of a type.
template <class T> struct ComputeOf { using type = float; };
template <> struct ComputeOf<double> { using type = double; };

// The element type of an array that is read or written once per column, chosen at run time.
enum ElementCode : int { kNone = 0, kFloat16 = 1, kBfloat16 = 2, kFloat32 = 3, kFloat64 = 4 };

template <class T> constexpr int kCodeOf = kNone;
template <> constexpr int kCodeOf<float16> = kFloat16;
template <> constexpr int kCodeOf<bfloat16> = kBfloat16;
template <> constexpr int kCodeOf<float32> = kFloat32;
template <> constexpr int kCodeOf<float64> = kFloat64;

__device__ constexpr int element_bytes(int code) { return code == kFloat64 ? 8 : code == kFloat32 ? 4 : 2; }

__device__ constexpr int minimum(int a, int b) { return a < b ? a : b; }
__device__ inline int log2_of(unsigned n) { return 31 - __clz(n); }  // rounded down

// Where column `column` of an array over columns lies.
__device__ inline const void* column_address(const void* base, int code, int64 column) {
    return static_cast<const char*>(base) + column * element_bytes(code);
}

// --- widening: exact ------------------------------------------------------------------------------------------------

template <class C> __device__ C widen(float16 value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}
template <class C> __device__ C widen(bfloat16 value) { return __uint_as_float(unsigned(value.bits) << 16); }
template <class C> __device__ C widen(float value) { return value; }
template <class C> __device__ C widen(double value) { return C(value); }

// --- narrowing: one rounding to nearest, ties to even ---------------------------------------------------------------

template <class T> struct Narrow;

template <> struct Narrow<float64> {
    __device__ static double from(double value) { return value; }
};

template <> struct Narrow<float32> {
    __device__ static float from(float value) { return value; }
    __device__ static float from(double value) { return float(value); }
};

// float64 on its way to 16 bits: truncated to float32 with the lost bits folded into the last one ("round to odd"),
// so that the second rounding is the only one that shows.
__device__ inline float round_to_odd(double value) {
    const float truncated = __double2float_rz(value);
    const bool inexact = double(truncated) != value && value == value;
    return __uint_as_float(__float_as_uint(truncated) | unsigned(inexact));
}

template <> struct Narrow<float16> {
    __device__ static float16 from(float value) {
        float16 result;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
        return result;
    }
    __device__ static float16 from(double value) { return from(round_to_odd(value)); }
    __device__ static unsigned pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
        unsigned packed;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
#else
        return unsigned(from(low).bits) | unsigned(from(high).bits) << 16;
#endif
    }
};

template <> struct Narrow<bfloat16> {
    __device__ static bfloat16 from(float value) {
#if __CUDA_ARCH__ >= 800
        bfloat16 result;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
        return result;
#else
        const unsigned bits = __float_as_uint(value);
        const unsigned rounded = bits + 0x7fffu + (bits >> 16 & 1u);
        return {(unsigned short)((value == value ? rounded : bits | 0x400000u) >> 16)};
#endif
    }
    __device__ static bfloat16 from(double value) { return from(round_to_odd(value)); }
    __device__ static unsigned pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
        unsigned packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
#else
        return unsigned(from(low).bits) | unsigned(from(high).bits) << 16;
#endif
    }
};

// Of a type known at run time: dw, db.
template <class C> __device__ void store_element(void* base, int code, int64 index, C value) {
    switch (code) {
        case kFloat16: static_cast<float16*>(base)[index] = Narrow<float16>::from(value); break;
        case kBfloat16: static_cast<bfloat16*>(base)[index] = Narrow<bfloat16>::from(value); break;
        case kFloat32: static_cast<float*>(base)[index] = Narrow<float32>::from(value); break;
        default: static_cast<double*>(base)[index] = value;
    }
}

// --- arithmetic -----------------------------------------------------------------------------------------------------

// a·b + c, rounded once. Where two pieces of code are to give the same bits, the compiler has no choice.
__device__ inline float32 fused(float32 a, float32 b, float32 c) { return __fmaf_rn(a, b, c); }
__device__ inline float64 fused(float64 a, float64 b, float64 c) { return __fma_rn(a, b, c); }

// --- packed vectors -------------------------------------------------------------------------------------------------

// Elements of an access, with VECTOR = 0: rows of x, dy, dx and y start at multiples of so many, and have a multiple of so many
// columns; w and b may start anywhere.
#ifndef NARROW_VECTOR
#define NARROW_VECTOR 1
#endif

// Odd rows: of 16 bits, which start, or end, at odd elements. A thread's columns come in pairs (struct OddPair below, Columns of
// columns.cuh), in one of three ways, of which a row has the same bits in all:
//   1: pairs are words of memory as they lie, so that those of a row which starts at an odd element begin one before it (kShifts):
//      x, dy and dx (forward x and y) of a row start at the same half of a word, and so do all rows of a group
//   2: the same, but what is written may start at the other half (RowWriter of columns.cuh)
//   3: all start anywhere, and go element by element
#ifndef ODD_ROWS
#define ODD_ROWS 0
#endif
constexpr bool kOddRows = ODD_ROWS > 0, kShifts = ODD_ROWS == 1 || ODD_ROWS == 2;

template <int kBytes> struct WordOf { using type = uint4; };
template <> struct WordOf<8> { using type = uint2; };
template <> struct WordOf<4> { using type = unsigned; };

// V consecutive elements as they lie in memory: one element, or whole words of 16 bytes, or one of 8 or 4.
template <class T, int V> struct Packed {
    static constexpr int kBytes = V * int(sizeof(T));
    using Word = typename WordOf<kBytes>::type;
    static constexpr int kWords = kBytes / int(sizeof(Word));
    static_assert(kWords * int(sizeof(Word)) == kBytes, "a vector fills whole words");
    Word words[kWords];

    __device__ void load(const T* source) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const Word*>(source)[i];
    }

    __device__ void load_read_only(const T* source) {  // which nobody writes as long as the kernel runs
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = __ldg(reinterpret_cast<const Word*>(source) + i);
    }

    __device__ void load_streaming(const T* source) {  // read once: leave the cache to what is read again
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = __ldcs(reinterpret_cast<const Word*>(source) + i);
    }

    __device__ void store(T* target) const {
#pragma unroll
        for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(target)[i] = words[i];
    }

    __device__ void store_streaming(T* target) const {
#pragma unroll
        for (int i = 0; i < kWords; ++i) __stcs(reinterpret_cast<Word*>(target) + i, words[i]);
    }

    template <class C> __device__ void unpack(C (&values)[V]) const {
        const unsigned* word = reinterpret_cast<const unsigned*>(words);
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (int i = 0; i < V / 2; ++i) {
                values[2 * i] = widen<C>(T{(unsigned short)(word[i] & 0xffffu)});
                values[2 * i + 1] = widen<C>(T{(unsigned short)(word[i] >> 16)});
            }
        } else if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < V; ++i) values[i] = widen<C>(__uint_as_float(word[i]));
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i) values[i] = widen<C>(__hiloint2double(int(word[2 * i + 1]), int(word[2 * i])));
        }
    }

    template <class C> __device__ void pack(const C (&values)[V]) {
        unsigned* word = reinterpret_cast<unsigned*>(words);
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (int i = 0; i < V / 2; ++i) word[i] = Narrow<T>::pair(float(values[2 * i]), float(values[2 * i + 1]));
        } else if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < V; ++i) word[i] = __float_as_uint(Narrow<T>::from(values[i]));
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i) {
                word[2 * i] = unsigned(__double2loint(values[i]));
                word[2 * i + 1] = unsigned(__double2hiint(values[i]));
            }
        }
    }
};

template <class T> struct Packed<T, 1> {
    T element;
    __device__ void load(const T* source) { element = *source; }
    __device__ void load_read_only(const T* source) {
        if constexpr (sizeof(T) == 2) element = {__ldg(reinterpret_cast<const unsigned short*>(source))};
        else element = __ldg(source);
    }
    __device__ void load_streaming(const T* source) { element = *source; }
    __device__ void store(T* target) const { *target = element; }
    __device__ void store_streaming(T* target) const { *target = element; }
    template <class C> __device__ void unpack(C (&values)[1]) const { values[0] = widen<C>(element); }
    template <class C> __device__ void pack(const C (&values)[1]) { element = Narrow<T>::from(values[0]); }
};

// A pair of columns of an odd row.
template <class T> struct OddPair : Packed<T, 2> {
    using Packed<T, 2>::words;

    __device__ void load(const T* source) {
        if constexpr (kShifts) words[0] = *reinterpret_cast<const unsigned*>(source);
        else words[0] = source[0].bits | unsigned(source[1].bits) << 16;
    }
    __device__ T first() const { return {(unsigned short)(words[0] & 0xffffu)}; }
    __device__ T second() const { return {(unsigned short)(words[0] >> 16)}; }
};

// A thread's vector of a row, and what it holds of it: all or nothing, but of an odd row's pair these halves (0xffff, 0xffff0000).
template <class T, int V, bool kOdd> struct RowVectorOf {
    using Vector = Packed<T, V>;
    using Held = bool;
};
template <class T> struct RowVectorOf<T, 2, true> {
    using Vector = OddPair<T>;
    using Held = unsigned;
};
template <class T, int V> using RowVector = typename RowVectorOf<T, V, kOddRows>::Vector;
using Held = RowVectorOf<unsigned short, 2, kOddRows>::Held;

// What is not held is not read.
template <class T, int V> __device__ void load_held(Packed<T, V>& vector, const T* source, bool held) {
    if (held) vector.load_streaming(source);
}
template <class T> __device__ void load_held(OddPair<T>& pair, const T* source, unsigned held) {
    pair.words[0] = (held & 0xffffu ? source[0].bits : 0u) | (held >> 16 ? unsigned(source[1].bits) << 16 : 0u);
}
// Zeros in place of what is not held; of vectors whoever works on them sees to it.
template <class T, int V> __device__ void keep_held(Packed<T, V>&, bool) {}
template <class T> __device__ void keep_held(OddPair<T>& pair, unsigned held) { pair.words[0] &= held; }

template <bool kStreaming, class T, int V> __device__ void store_held(const Packed<T, V>& vector, T* target, bool held) {
    if (!held) return;
    if constexpr (kStreaming) vector.store_streaming(target);
    else vector.store(target);
}
template <bool kStreaming, class T> __device__ void store_held(const OddPair<T>& pair, T* target, unsigned held) {
    if (held & 0xffffu) target[0] = pair.first();
    if (held >> 16) target[1] = pair.second();
}

// Loads into registers that hold values already: where this stands under a condition, nothing waits for it before they are
// read. What is assigned under a condition the compiler loads into other registers, and waits for there, to move it.
__device__ inline void load_in_place(float32& value, const float32* source) {
    asm volatile("ld.global.f32 %0, [%1];" : "+f"(value) : "l"(source));
}
__device__ inline void load_in_place(float64& value, const float64* source) {
    asm volatile("ld.global.f64 %0, [%1];" : "+d"(value) : "l"(source));
}
__device__ inline void load_in_place(float32 (&values)[4], const float32* source) {
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "+f"(values[0]), "+f"(values[1]), "+f"(values[2]), "+f"(values[3]) : "l"(source));
}
// The value in another register, from here on: its own may be loaded into.
__device__ inline float32 moved(float32 value) {
    float32 copy;
    asm volatile("mov.f32 %0, %1;" : "=f"(copy) : "f"(value));
    return copy;
}
__device__ inline float64 moved(float64 value) {
    float64 copy;
    asm volatile("mov.f64 %0, %1;" : "=d"(copy) : "d"(value));
    return copy;
}

// --- a thread's share of an array over columns ----------------------------------------------------------------------

template <class C, int K, int V> __device__ void fill_columns(C (&values)[K][V], C value) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int v = 0; v < V; ++v) values[k][v] = value;
    }
}

// K vectors of V columns, vector k from column_of(k) on, or left alone where that is negative. One branch on the type
// around all loads, so that they wait for memory together: up to 40 columns, more would take too many registers.
template <class T, class C, int K, int V, class ColumnOf>
__device__ void load_columns_of_type(C (&values)[K][V], const void* base, ColumnOf column_of) {
    constexpr int kTogether = K * V <= 40 ? K : 32 / V;
#pragma unroll
    for (int first = 0; first < K; first += kTogether) {
        Packed<T, V> packed[kTogether];
#pragma unroll
        for (int i = 0; i < minimum(kTogether, K - first); ++i) {
            if (const int column = column_of(first + i); column >= 0) {
                packed[i].load(static_cast<const T*>(base) + column);
            }
        }
#pragma unroll
        for (int i = 0; i < minimum(kTogether, K - first); ++i) {
            if (column_of(first + i) >= 0) packed[i].unpack(values[first + i]);
        }
        if constexpr (kTogether < K) asm volatile("" ::: "memory");
    }
}

template <class C, int K, int V, class ColumnOf>
__device__ void load_columns(C (&values)[K][V], const void* base, int code, ColumnOf column_of) {
    switch (code) {
        case kFloat16: load_columns_of_type<float16>(values, base, column_of); break;
        case kBfloat16: load_columns_of_type<bfloat16>(values, base, column_of); break;
        case kFloat32: load_columns_of_type<float32>(values, base, column_of); break;
        case kFloat64: load_columns_of_type<float64>(values, base, column_of); break;
    }
}

// The same, of one of two types.
template <class T, class U, class C, int K, int V, class ColumnOf>
__device__ void load_columns_of_either(C (&values)[K][V], const void* base, int code, ColumnOf column_of) {
    if (code == kCodeOf<T>) load_columns_of_type<T>(values, base, column_of);
    else if (code == kCodeOf<U>) load_columns_of_type<U>(values, base, column_of);
}

// The same, but float32 that need not be widened are not waited for.
template <class C, int K, int V, class ColumnOf>
__device__ void load_columns_ahead(C (&values)[K][V], const void* base, int code, ColumnOf column_of) {
    constexpr int kRun = V % 4 == 0 ? 4 : 1;
    if constexpr (sizeof(C) == 4) {
        if (code == kFloat32) {
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const int column = column_of(k);
                if (column < 0) continue;
#pragma unroll
                for (int v = 0; v < V; v += kRun) {
                    const float32* const source = static_cast<const float32*>(base) + column + v;
                    if constexpr (kRun == 4) load_in_place(reinterpret_cast<float32(&)[4]>(values[k][v]), source);
                    else load_in_place(values[k][v], source);
                }
            }
            return;
        }
    }
    load_columns(values, base, code, column_of);
}

// The same, of T too, if that has 16 bits and vectors eight elements: these lie as they came where their second halves will be,
// until unpack_columns(). Returns whether the array was of T.
template <class T, class C, int K, int V, class ColumnOf>
__device__ bool load_columns_packed(C (&values)[K][V], const void* base, int code, ColumnOf column_of) {
    if constexpr (sizeof(T) == 2 && V == 8) {
        if (code == kCodeOf<T>) {
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const int column = column_of(k);
                if (column < 0) continue;
                const void* const source = static_cast<const T*>(base) + column;
                load_in_place(reinterpret_cast<float32(&)[4]>(values[k][4]), static_cast<const float32*>(source));
            }
            return true;
        }
    }
    load_columns_ahead(values, base, code, column_of);
    return false;
}
template <class T, class C, int K, int V> __device__ void unpack_columns(C (&values)[K][V]) {
    if constexpr (sizeof(T) == 2 && V == 8) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            Packed<T, V> packed;
            packed.words[0] = {__float_as_uint(values[k][4]), __float_as_uint(values[k][5]), __float_as_uint(values[k][6]),
                               __float_as_uint(values[k][7])};
            packed.unpack(values[k]);
        }
    }
}
