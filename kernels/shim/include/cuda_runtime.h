// CUDA C++ for g++, for kernels that are compiled at run time: what the code that cubecl generates uses. Tensor cores,
// asynchronous copies and inline PTX are not here, so kernels with them do not compile.
//
// No header of the standard library is included: g++ would take longer for it than for most kernels.
#pragma once

#include "block.hpp"

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// Blocks run one after another on a thread. In a function this is also static.
#define __shared__ thread_local

namespace compiled {

static thread_local const Block *block;

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

template <class T>
constexpr bool is_float = same<T, float> || same<T, double>;

}  // namespace compiled

#define threadIdx (::compiled::block->thread)
#define blockIdx (::compiled::block->block)
#define blockDim (::compiled::block->size)
#define gridDim (::compiled::block->grid)
constexpr int warpSize = 32;

typedef ::compiled::Index uint3;
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }

extern "C" int printf(const char *format, ...);

// Barriers and warps

inline void __syncthreads() { compiled::block->sync(); }
inline void __syncwarp(unsigned = ~0u) { compiled::block->share(0); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

namespace compiled {

inline unsigned lane() {
    const Index &at = block->thread, &size = block->size;
    return (at.x + size.x * (at.y + size.y * at.z)) % 32;
}

// Returns the value of another lane, or its own if that one does not take part.
template <class T>
T value_of(unsigned other, T value) {
    static_assert(sizeof(T) <= 8);
    unsigned long long word = 0;
    __builtin_memcpy(&word, &value, sizeof value);
    const Lanes &lanes = *block->share(word);
    if (other < 32 && lanes.present >> other & 1) __builtin_memcpy(&value, &lanes.values[other], sizeof value);
    return value;
}

// Returns the bits of the lanes that passed true.
inline unsigned votes(bool yes) {
    const Lanes &lanes = *block->share(yes);
    unsigned all = 0;
    for (unsigned i = 0; i < 32; ++i) all |= (lanes.present >> i & lanes.values[i] & 1) << i;
    return all;
}

// The lanes that take part in an operation.
inline unsigned present() { return block->share(0)->present; }

}  // namespace compiled

// With the mask of all lanes and the width of a whole warp.
template <class T>
T __shfl_sync(unsigned, T value, unsigned source) { return compiled::value_of(source % 32, value); }
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) { return compiled::value_of(compiled::lane() ^ mask, value); }
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned by) { return compiled::value_of(compiled::lane() - by, value); }
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned by) { return compiled::value_of(compiled::lane() + by, value); }
inline unsigned __ballot_sync(unsigned, bool yes) { return compiled::votes(yes); }
inline int __any_sync(unsigned, bool yes) { return compiled::votes(yes) != 0; }
inline int __all_sync(unsigned, bool yes) { return compiled::votes(!yes) == 0; }

// Atomic operations

namespace compiled {

// Replaces the value by `next(value)`, and returns what it was.
template <class T, class Next>
T update(T *at, Next next) {
    T before, after;
    __atomic_load(at, &before, __ATOMIC_RELAXED);
    do {
        after = next(before);
    } while (!__atomic_compare_exchange(at, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

}  // namespace compiled

template <class T, class V>
T atomicAdd(T *at, V value) { return compiled::update(at, [=](T now) { return T(now + value); }); }
template <class T, class V>
T atomicSub(T *at, V value) { return compiled::update(at, [=](T now) { return T(now - value); }); }
template <class T, class V>
T atomicMax(T *at, V value) { return compiled::update(at, [=](T now) { return now < T(value) ? T(value) : now; }); }
template <class T, class V>
T atomicMin(T *at, V value) { return compiled::update(at, [=](T now) { return T(value) < now ? T(value) : now; }); }
template <class T, class V>
T atomicAnd(T *at, V value) { return compiled::update(at, [=](T now) { return T(now & value); }); }
template <class T, class V>
T atomicOr(T *at, V value) { return compiled::update(at, [=](T now) { return T(now | value); }); }
template <class T, class V>
T atomicXor(T *at, V value) { return compiled::update(at, [=](T now) { return T(now ^ value); }); }
template <class T, class V>
T atomicExch(T *at, V value) { return compiled::update(at, [=](T) { return T(value); }); }
template <class T, class E, class V>
T atomicCAS(T *at, E expected, V value) {
    return compiled::update(at, [=](T now) { return now == T(expected) ? T(value) : now; });
}

// Mathematical functions

#define SHIM_UNARY(name)                                          \
    inline float name(float x) { return __builtin_##name##f(x); } \
    inline double name(double x) { return __builtin_##name(x); }
SHIM_UNARY(exp) SHIM_UNARY(log) SHIM_UNARY(log1p) SHIM_UNARY(sin) SHIM_UNARY(cos) SHIM_UNARY(tan) SHIM_UNARY(sinh)
SHIM_UNARY(cosh) SHIM_UNARY(tanh) SHIM_UNARY(asin) SHIM_UNARY(acos) SHIM_UNARY(atan) SHIM_UNARY(asinh)
SHIM_UNARY(acosh) SHIM_UNARY(atanh) SHIM_UNARY(sqrt) SHIM_UNARY(ceil) SHIM_UNARY(trunc) SHIM_UNARY(floor)
SHIM_UNARY(rint) SHIM_UNARY(erf)
#undef SHIM_UNARY

inline float rsqrt(float x) { return 1 / sqrt(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float powf(float x, float y) { return __builtin_powf(x, y); }
inline double pow(double x, double y) { return __builtin_pow(x, y); }
inline float hypotf(float x, float y) { return __builtin_hypotf(x, y); }
inline double hypot(double x, double y) { return __builtin_hypot(x, y); }
inline float rhypotf(float x, float y) { return 1 / hypotf(x, y); }
inline double rhypot(double x, double y) { return 1 / hypot(x, y); }
inline float atan2(float y, float x) { return __builtin_atan2f(y, x); }
inline double atan2(double y, double x) { return __builtin_atan2(y, x); }
inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }

// The fast ones of a GPU are less accurate.
inline float __expf(float x) { return exp(x); }
inline float __logf(float x) { return log(x); }
inline float __sinf(float x) { return sin(x); }
inline float __cosf(float x) { return cos(x); }
inline float __tanhf(float x) { return tanh(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fsqrt_rn(float x) { return sqrt(x); }
inline float __frsqrt_rn(float x) { return rsqrt(x); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fdividef(float x, float y) { return x / y; }

template <class T>
T abs(T x) {
    if constexpr (compiled::is_float<T>) return T(__builtin_fabs(x));
    else return x < 0 ? T(-x) : x;
}

// Of a number and NaN, both are the number.
template <class A, class B>
auto max(A a, B b) -> decltype(a + b) {
    typedef decltype(a + b) T;
    if constexpr (compiled::is_float<T>) return a != a || T(a) < T(b) ? T(b) : T(a);
    else return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B>
auto min(A a, B b) -> decltype(a + b) {
    typedef decltype(a + b) T;
    if constexpr (compiled::is_float<T>) return a != a || T(b) < T(a) ? T(b) : T(a);
    else return T(b) < T(a) ? T(b) : T(a);
}

// Bits of integers

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned long long __brevll(unsigned long long x) {
    unsigned long long reversed = 0;
    for (int i = 0; i < 64; ++i) reversed |= (x >> i & 1) << (63 - i);
    return reversed;
}
inline unsigned __brev(unsigned x) { return unsigned(__brevll(x) >> 32); }
inline int __mulhi(int x, int y) { return int((long long)x * y >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned((unsigned long long)x * y >> 32); }
inline long long __mul64hi(long long x, long long y) { return (long long)((__int128)x * y >> 64); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}

// Entries: how the driver calls a kernel

namespace compiled {

inline void *dynamic_shared() { return block->dynamic; }

template <unsigned... I>
struct Numbers {};

template <auto kernel>
struct Call;

template <class... P, void (*kernel)(P...)>
struct Call<kernel> {
    static constexpr unsigned count = sizeof...(P);
    static constexpr unsigned sizes[] = {unsigned(sizeof(P))..., 0};

    template <unsigned... I>
    static void spread(void *const *parameters, Numbers<I...>) {
        kernel(*static_cast<P *>(parameters[I])...);
    }
    static void run(const Block *of, void *const *parameters) {
        block = of;
        spread(parameters, Numbers<__integer_pack(count)...>());
    }
};

}  // namespace compiled

#define SHIM_ENTRY(kernel, waits)                                                              \
    extern "C" __attribute__((visibility("default"))) const compiled::Entry shim_entry_##kernel = { \
        compiled::Call<kernel>::count, compiled::Call<kernel>::sizes, waits, compiled::Call<kernel>::run};
