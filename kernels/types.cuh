// Type names. NVRTC has no <cstdint>, and kernels are named after these types: two_shot_sum_f32.
#ifndef BONFIRE_TYPES_CUH
#define BONFIRE_TYPES_CUH

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;
typedef float f32;
typedef double f64;

// 16-bit floats are stored as bits; arithmetic on them is done in f32.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

#endif
