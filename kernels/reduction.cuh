// Reductions of one element: the same as on the host (crates/core/src/reduce), bit for bit.
//
// A reduction of T has an accumulator: f32 for f16 and bf16, so that a sum is rounded once; a wider integer for the
// mean of integers, so that it is the mean of the exact sum; T itself everywhere else. Elements are combined in the
// order of ranks. Integers wrap; an integer mean rounds toward zero. Max and Min give NaN if any rank has one, and the
// earlier rank's zero of two. Every NaN that is stored has the same bits.
#ifndef BONFIRE_REDUCTION_CUH
#define BONFIRE_REDUCTION_CUH

#include "ptx.cuh"

// A 128-bit sum, for means of 64-bit integers.
template <class T>
struct Long {
    u64 low;
    i64 high;  // of at most 8 terms: between -8 and 7
};

// The type in which sums of T are computed, and one that holds the exact sum of 8 T.
template <class T>
struct Wider;
template <> struct Wider<f32> { typedef f32 Sum, Exact; };
template <> struct Wider<f64> { typedef f64 Sum, Exact; };
template <> struct Wider<f16> { typedef f32 Sum, Exact; };
template <> struct Wider<bf16> { typedef f32 Sum, Exact; };
template <> struct Wider<i8> { typedef u8 Sum; typedef i32 Exact; };
template <> struct Wider<u8> { typedef u8 Sum; typedef u32 Exact; };
template <> struct Wider<i32> { typedef u32 Sum; typedef i64 Exact; };
template <> struct Wider<u32> { typedef u32 Sum; typedef u64 Exact; };
template <> struct Wider<i64> { typedef u64 Sum; typedef Long<i64> Exact; };
template <> struct Wider<u64> { typedef u64 Sum; typedef Long<u64> Exact; };

// Max and Min of integers are computed with the element's sign, which unsigned wrapping would lose. Those of bytes take
// whole registers anyway, and in the element's type the compiler would extend them again at every step.
template <class T> struct Ordered { typedef T Type; };
template <> struct Ordered<i8> { typedef i32 Type; };
template <> struct Ordered<u8> { typedef u32 Type; };
template <> struct Ordered<f16> { typedef f32 Type; };
template <> struct Ordered<bf16> { typedef f32 Type; };

// element -> accumulator

template <class A, class T>
struct Widen {
    static __device__ __forceinline__ A from(T value) { return static_cast<A>(value); }
};
template <>
struct Widen<f32, f16> {
    static __device__ __forceinline__ f32 from(f16 value) { return ptx::widen(value); }
};
template <>
struct Widen<f32, bf16> {
    static __device__ __forceinline__ f32 from(bf16 value) { return ptx::from_bits(u32(value.bits) << 16); }
};
template <>
struct Widen<Long<i64>, i64> {
    static __device__ __forceinline__ Long<i64> from(i64 value) { return {u64(value), value >> 63}; }
};
template <>
struct Widen<Long<u64>, u64> {
    static __device__ __forceinline__ Long<u64> from(u64 value) { return {value, 0}; }
};

// accumulator -> element; integers keep the low bits

template <class T, class A>
struct Narrow {
    static __device__ __forceinline__ T from(A value) { return static_cast<T>(value); }
};
template <>
struct Narrow<f32, f32> {
    static __device__ __forceinline__ f32 from(f32 value) {
        return value == value ? value : ptx::from_bits(0x7fc00000u);
    }
};
template <>
struct Narrow<f64, f64> {
    static __device__ __forceinline__ f64 from(f64 value) {
        return value == value ? value : ptx::from_bits(0x7ff8000000000000ull);
    }
};
template <>
struct Narrow<f16, f32> {
    static __device__ __forceinline__ f16 from(f32 value) {
        return value == value ? ptx::narrow_to_f16(value) : f16{0x7e00};
    }
};
template <>
struct Narrow<bf16, f32> {
    // Rounds to nearest, ties to even: adds half a unit less one, and one more if the last kept bit is odd. A carry
    // into the exponent is correct: it gives the next power of two, or infinity. Older GPUs have no instruction for it.
    static __device__ __forceinline__ bf16 from(f32 value) {
        u32 bits = ptx::bits(value);
        return value == value ? bf16{u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)} : bf16{0x7fc0};
    }
};

// sums

template <class A>
__device__ __forceinline__ A add(A left, A right) {
    return static_cast<A>(left + right);
}
template <class T>
__device__ __forceinline__ Long<T> add(Long<T> left, Long<T> right) {
    u64 low = left.low + right.low;
    return {low, left.high + right.high + (low < left.low)};
}

template <class A>
__device__ __forceinline__ A divide(A sum, u32 ranks) {
    return sum / static_cast<A>(ranks);
}
// The quotient of a 67-bit magnitude, by long division with digits of 32 bits: a remainder is below 8, so the next
// dividend is below 2^35.
template <class T>
__device__ __forceinline__ Long<T> divide(Long<T> sum, u32 ranks) {
    bool negative = sum.high < 0;
    u64 low = negative ? 0 - sum.low : sum.low;
    u64 high = negative ? u64(~sum.high) + (sum.low == 0) : u64(sum.high);
    u64 upper = high << 32 | low >> 32;
    u64 lower = upper % ranks << 32 | (low & 0xffffffff);
    u64 quotient = (upper / ranks << 32) + lower / ranks;
    return {negative ? 0 - quotient : quotient, 0};
}
template <class T, class S>
struct Narrow<T, Long<S>> {
    static __device__ __forceinline__ T from(Long<S> value) { return static_cast<T>(value.low); }
};

// The reductions. `NUMBER` is the number in ReduceOp in crates/core/src/types/dtype.rs.

template <class T>
struct Sum {
    typedef T Element;
    typedef typename Wider<T>::Sum Accumulator;
    static constexpr u32 NUMBER = 0;
    static __device__ __forceinline__ Accumulator join(Accumulator left, Accumulator right) { return add(left, right); }
    static __device__ __forceinline__ Accumulator finish(Accumulator sum, u32) { return sum; }
};

template <class T>
struct Mean {
    typedef T Element;
    typedef typename Wider<T>::Exact Accumulator;
    static constexpr u32 NUMBER = 1;
    static __device__ __forceinline__ Accumulator join(Accumulator left, Accumulator right) { return add(left, right); }
    static __device__ __forceinline__ Accumulator finish(Accumulator sum, u32 ranks) { return divide(sum, ranks); }
};

template <class T>
struct Max {
    typedef T Element;
    typedef typename Ordered<T>::Type Accumulator;
    static constexpr u32 NUMBER = 2;
    static __device__ __forceinline__ Accumulator join(Accumulator left, Accumulator right) {
        return left != left || left >= right ? left : right;
    }
    static __device__ __forceinline__ Accumulator finish(Accumulator most, u32) { return most; }
};

template <class T>
struct Min {
    typedef T Element;
    typedef typename Ordered<T>::Type Accumulator;
    static constexpr u32 NUMBER = 3;
    static __device__ __forceinline__ Accumulator join(Accumulator left, Accumulator right) {
        return left != left || left <= right ? left : right;
    }
    static __device__ __forceinline__ Accumulator finish(Accumulator least, u32) { return least; }
};

#endif
