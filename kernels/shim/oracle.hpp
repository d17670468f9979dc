// The oracle: expected results, written from the specification (crates/core/src/reduce.rs, docs/design.md) and not from
// the kernels. Elements are bits, 16-bit floats are decoded by hand, exact sums are __int128.
#pragma once

#include <cmath>
#include <cstring>

#include "../types.cuh"

namespace oracle {

// Numbers of crates/core/src/types/dtype.rs.
enum Type { F32 = 0, F64 = 1, F16 = 2, BF16 = 3, I8 = 4, I32 = 6, I64 = 7, U8 = 8, U32 = 10, U64 = 11 };
enum Reduction { SUM = 0, MEAN = 1, MAX = 2, MIN = 3 };

inline u32 size_of(Type type) {
    switch (type) {
        case I8: case U8: return 1;
        case F16: case BF16: return 2;
        case F32: case I32: case U32: return 4;
        default: return 8;
    }
}

struct Format {
    int exponent, mantissa;  // bits
};
inline Format format(Type type) {
    switch (type) {
        case F32: return {8, 23};
        case F64: return {11, 52};
        case F16: return {5, 10};
        default: return {8, 7};
    }
}

inline double decode(u64 bits, Format f) {
    int exponent = int(bits >> f.mantissa & ((1ull << f.exponent) - 1)), bias = (1 << (f.exponent - 1)) - 1;
    u64 mantissa = bits & ((1ull << f.mantissa) - 1);
    double magnitude;
    if (exponent == 2 * bias + 1) magnitude = mantissa ? NAN : INFINITY;
    else if (exponent == 0) magnitude = ldexp(double(mantissa), 1 - bias - f.mantissa);
    else magnitude = ldexp(double(mantissa | 1ull << f.mantissa), exponent - bias - f.mantissa);
    return bits >> (f.exponent + f.mantissa) & 1 ? -magnitude : magnitude;
}

// Rounds to nearest, ties to even. There is one NaN.
inline u64 encode(double value, Format f) {
    int bias = (1 << (f.exponent - 1)) - 1;
    u64 infinity = ((1ull << f.exponent) - 1) << f.mantissa;
    if (std::isnan(value)) return infinity | 1ull << (f.mantissa - 1);
    u64 sign = std::signbit(value) ? 1ull << (f.exponent + f.mantissa) : 0;
    double magnitude = fabs(value);
    if (magnitude == 0) return sign;
    if (std::isinf(magnitude)) return sign | infinity;
    int exponent = ilogb(magnitude) < 1 - bias ? 1 - bias : ilogb(magnitude);
    // Exponent and mantissa are added as one number, in units of the last place: rounding may carry into the exponent.
    u64 units = u64(nearbyint(ldexp(magnitude, f.mantissa - exponent)));
    u64 bits = (u64(exponent + bias - 1) << f.mantissa) + units;
    return sign | (bits < infinity ? bits : infinity);
}

// `Work` is the type in which the sum is computed.
template <class Work>
u64 reduce_floats(Type type, Reduction reduction, const u64 *values, u32 ranks) {
    Format f = format(type);
    Work result = Work(decode(values[0], f));
    for (u32 rank = 1; rank < ranks; ++rank) {
        Work next = Work(decode(values[rank], f));
        switch (reduction) {
            case SUM: case MEAN: result = result + next; break;
            case MAX: result = std::isnan(result) || result >= next ? result : next; break;
            case MIN: result = std::isnan(result) || result <= next ? result : next; break;
        }
    }
    if (reduction == MEAN) result = result / Work(ranks);
    return encode(double(result), f);
}

inline u64 reduce_integers(Type type, Reduction reduction, const u64 *values, u32 ranks) {
    auto exact = [type](u64 bits) -> __int128 {
        switch (type) {
            case I8: return i8(bits);
            case I32: return i32(bits);
            case I64: return i64(bits);
            default: return bits;
        }
    };
    __int128 result = exact(values[0]);
    for (u32 rank = 1; rank < ranks; ++rank) {
        __int128 next = exact(values[rank]);
        if (reduction == MAX) result = next > result ? next : result;
        else if (reduction == MIN) result = next < result ? next : result;
        else result += next;
    }
    if (reduction == MEAN) result /= ranks;
    u32 bits = 8 * size_of(type);
    return u64(result) & (bits == 64 ? ~0ull : (1ull << bits) - 1);
}

// Reduces one element from all ranks, as bits.
inline u64 reduce(Type type, Reduction reduction, const u64 *values, u32 ranks) {
    switch (type) {
        case F64: return reduce_floats<double>(type, reduction, values, ranks);
        case F32: case F16: case BF16: return reduce_floats<float>(type, reduction, values, ranks);
        default: return reduce_integers(type, reduction, values, ranks);
    }
}

inline u64 hash(u64 value) {
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
    value = (value ^ value >> 27) * 0x94d049bb133111eb;
    return value ^ value >> 31;
}

// A rank's element at an index: mostly ordinary numbers, among them zeros of both signs, all kinds of NaN, infinities,
// extremes, and arbitrary bits.
inline u64 value(Type type, u64 seed, u32 rank, u64 index) {
    u64 random = hash(seed + hash(index * 8 + rank));
    u64 mask = size_of(type) == 8 ? ~0ull : (1ull << 8 * size_of(type)) - 1;
    u64 choice = random >> 60;
    if (type > BF16) {
        if (choice == 0) return mask >> (random >> 40 & 1);  // the largest, unsigned and signed
        if (choice == 1) return mask ^ mask >> 1;            // the smallest, signed
        if (choice == 2) return random >> 40 & 3;
        return random & mask;
    }
    Format f = format(type);
    u64 sign = (random >> 59 & 1) << (f.exponent + f.mantissa), top = (1ull << f.exponent) - 1;
    u64 mantissa = random & ((1ull << f.mantissa) - 1);
    if (choice == 0) return random & mask;
    if (choice == 1) return sign | (random >> 56 & 1 ? mantissa : 0);  // zeros and subnormal numbers
    if (choice == 2 && (random >> 56 & 3) == 0) return sign | top << f.mantissa | (random >> 55 & 1 ? mantissa : 0);
    if (choice == 3) return sign | (top - 1) << f.mantissa | mantissa;  // huge
    return sign | (top / 2 + (random >> 52 & 7) - 4) << f.mantissa | mantissa;
}

inline u64 load(const unsigned char *at, u32 size) {
    u64 bits = 0;
    memcpy(&bits, at, size);
    return bits;
}

// The start of part `index` of `count` items, as in the host's partition().
inline u64 part_first(u64 count, u32 parts, u32 index) {
    return index * (count / parts) + (index < count % parts ? index : count % parts);
}

}  // namespace oracle
