// The element types and their reductions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace nccl {

enum Type { i8, u8, i32, u32, i64, u64, f16, f32, f64, bf16, e4m3, e5m2, types };
enum Op { sum, product, maximum, minimum, average, ops };

constexpr size_t sizes[types] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

// Where a rank publishes a chunk of its input.
constexpr size_t slot_bytes = 1 << 16;
using Slot = unsigned char[slot_bytes];

inline double from_bits(unsigned bits, int exponent_bits, int fraction_bits, bool infinities) {
    int bias = (1 << (exponent_bits - 1)) - 1;
    unsigned exponent = bits >> fraction_bits & ((1u << exponent_bits) - 1),
             fraction = bits & ((1u << fraction_bits) - 1);
    bool last = exponent == (1u << exponent_bits) - 1;
    double value;
    if (last && infinities) {
        value = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    } else if (last && fraction == (1u << fraction_bits) - 1) {
        value = std::numeric_limits<double>::quiet_NaN();
    } else if (exponent == 0) {
        value = std::ldexp(fraction, 1 - bias - fraction_bits);
    } else {
        value = std::ldexp(fraction | 1u << fraction_bits, int(exponent) - bias - fraction_bits);
    }
    return bits >> (exponent_bits + fraction_bits) & 1 ? -value : value;
}

// Rounds to the nearest representable number, ties to even. Numbers above the largest become infinity, if the format
// has it.
inline unsigned to_bits(double value, int exponent_bits, int fraction_bits, bool infinities) {
    unsigned sign = std::signbit(value) ? 1u << (exponent_bits + fraction_bits) : 0;
    unsigned nan = (1u << (exponent_bits + fraction_bits)) - 1;
    unsigned highest = infinities ? nan >> fraction_bits << fraction_bits : nan - 1;
    if (value == 0) return sign;
    if (!std::isfinite(value)) return sign | (std::isnan(value) ? nan : highest);
    int smallest = 2 - (1 << (exponent_bits - 1)), exponent;
    std::frexp(value, &exponent);
    // Below the smallest exponent the spacing of the numbers stays the same.
    int above = std::max(exponent - 1 - smallest, 0);
    double steps = std::nearbyint(std::ldexp(std::fabs(value), fraction_bits - smallest - above));
    // The order of numbers is the order of their bits, so rounding up may carry into the exponent.
    double bits = std::ldexp(above, fraction_bits) + steps;
    return sign | (bits < highest ? unsigned(bits) : highest);
}

// Floats of 16 and 8 bits, with conversions for arithmetic.
template <int Exponent, int Fraction, bool Infinities, class Bits>
struct Small {
    Bits bits;
    Small() = default;
    Small(double value) : bits(Bits(to_bits(value, Exponent, Fraction, Infinities))) {}
    operator double() const { return from_bits(bits, Exponent, Fraction, Infinities); }
};

template <class T>
T combine(T a, T b, Op op) {
    switch (op) {
        case product: return T(a * b);
        case maximum: return a > b ? a : b;
        case minimum: return a < b ? a : b;
        default: return T(a + b);
    }
}

// Reduces the ranks' slots in the order of ranks. Means are multiplied by 1/n first, as NCCL does.
template <class T>
void fold(const Slot* slots, size_t ranks, void* output, size_t bytes, Op op) {
    for (size_t i = 0; i < bytes / sizeof(T); ++i) {
        T whole{};
        for (size_t r = 0; r < ranks; ++r) {
            T one;
            memcpy(&one, slots[r] + i * sizeof(T), sizeof(T));
            if (op == average) one = T(one * T(1.0 / double(ranks)));
            whole = r == 0 ? one : combine<T>(whole, one, op);
        }
        memcpy(static_cast<unsigned char*>(output) + i * sizeof(T), &whole, sizeof(T));
    }
}

inline void fold(const Slot* slots, size_t ranks, void* output, size_t bytes, Type type, Op op) {
    switch (type) {
        // Unsigned, because sums and products wrap.
        case i8: return op == maximum || op == minimum ? fold<int8_t>(slots, ranks, output, bytes, op)
                                                       : fold<uint8_t>(slots, ranks, output, bytes, op);
        case i32: return op == maximum || op == minimum ? fold<int32_t>(slots, ranks, output, bytes, op)
                                                        : fold<uint32_t>(slots, ranks, output, bytes, op);
        case i64: return op == maximum || op == minimum ? fold<int64_t>(slots, ranks, output, bytes, op)
                                                        : fold<uint64_t>(slots, ranks, output, bytes, op);
        case u8: return fold<uint8_t>(slots, ranks, output, bytes, op);
        case u32: return fold<uint32_t>(slots, ranks, output, bytes, op);
        case u64: return fold<uint64_t>(slots, ranks, output, bytes, op);
        case f16: return fold<Small<5, 10, true, uint16_t>>(slots, ranks, output, bytes, op);
        case bf16: return fold<Small<8, 7, true, uint16_t>>(slots, ranks, output, bytes, op);
        case e4m3: return fold<Small<4, 3, false, uint8_t>>(slots, ranks, output, bytes, op);
        case e5m2: return fold<Small<5, 2, true, uint8_t>>(slots, ranks, output, bytes, op);
        case f32: return fold<float>(slots, ranks, output, bytes, op);
        default: return fold<double>(slots, ranks, output, bytes, op);
    }
}

}  // namespace nccl
