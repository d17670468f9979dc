// The kernels that a file instantiates: by default one per reduction and type, as NAME(reduction, Reduction, type).
//
// A host that wants a single one puts its choice before the source: `#define ONLY(NAME) NAME(sum, Sum, f32)`.
#ifndef BONFIRE_INSTANCES_CUH
#define BONFIRE_INSTANCES_CUH

#include "signal.cuh"

// Instantiates the template `form` over reductions as one kernel. One block per multiprocessor is enough: without the
// 1, the compiler spills on some GPUs to make room for a second one.
#define KERNEL(form, reduction, Reduction, type)                                              \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) form##_##reduction##_##type( \
        const __grid_constant__ Call call) {                                                  \
        form<Reduction<type>>(call);                                                          \
    }

#define WITH_EVERY_TYPE(NAME, reduction, Reduction)                                                \
    NAME(reduction, Reduction, f32) NAME(reduction, Reduction, f64)                                \
    NAME(reduction, Reduction, f16) NAME(reduction, Reduction, bf16)                               \
    NAME(reduction, Reduction, i8) NAME(reduction, Reduction, i32) NAME(reduction, Reduction, i64) \
    NAME(reduction, Reduction, u8) NAME(reduction, Reduction, u32) NAME(reduction, Reduction, u64)

#ifdef ONLY
#define INSTANCES(NAME) ONLY(NAME)
#else
#define INSTANCES(NAME)               \
    WITH_EVERY_TYPE(NAME, sum, Sum)   \
    WITH_EVERY_TYPE(NAME, mean, Mean) \
    WITH_EVERY_TYPE(NAME, max, Max)   \
    WITH_EVERY_TYPE(NAME, min, Min)
#endif

// The number of an element type in crates/core/src/types/dtype.rs.
template <class T> constexpr u32 NUMBER = ~0u;
template <> constexpr u32 NUMBER<f32> = 0;
template <> constexpr u32 NUMBER<f64> = 1;
template <> constexpr u32 NUMBER<f16> = 2;
template <> constexpr u32 NUMBER<bf16> = 3;
template <> constexpr u32 NUMBER<i8> = 4;
template <> constexpr u32 NUMBER<i32> = 6;
template <> constexpr u32 NUMBER<i64> = 7;
template <> constexpr u32 NUMBER<u8> = 8;
template <> constexpr u32 NUMBER<u32> = 10;
template <> constexpr u32 NUMBER<u64> = 11;

// Distinguishes the reductions of one operation.
template <class R>
constexpr u32 KIND = NUMBER<typename R::Element> | R::NUMBER << 8;

#endif
