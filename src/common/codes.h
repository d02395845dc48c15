// Codes of keys and values, and the scales that append_kv gives each token and KV head. They are defined once
// for all backends, which agree in every bit.
//
//   int8, float8: scale = absmax / kMax; code = the number nearest to x * (1 / scale)
//   int4:         scale = float16((max - min) / 15), minimum = float16(min);
//                 code = the number nearest to (x - minimum) * (1 / scale), both as rounded
//
// All of this is computed in float32; ties round to even, and codes saturate. A row of zeros (for int4, of
// one value), and any row whose scale would be too small, has the scale 1 and codes of 0. A row with NaN or
// infinity, and for int4 one beyond the range of float16, has the scale NaN, which spoils no other row. The
// largest and smallest numbers of a row are found by comparing bits as integers, in any order.
#pragma once

#include "common/float16.h"
#include "common/float8.h"
#include "common/rounded.h"

#include <cmath>
#include <cstdint>

namespace octavo {

// Rounds to nearest, ties to even.
OCTAVO_HD float rounded_integer(float x) {
#ifdef __CUDA_ARCH__
    return rintf(x);
#else
    return nearbyintf(x);
#endif
}

constexpr uint32_t kInfinityBits = 0x7f800000u, kNanBits = 0x7fc00000u;  // of float32
constexpr uint32_t kLeastScaleBits = 1u << 23;  // 2^-126: the inverse of a smaller scale may overflow

// The scale between numbers and codes, for the row of one token and KV head, or for a whole array.
struct CodeScale {
    float scale;
    float minimum;  // what the code 0 of int4 stands for
    float inverse;  // 1 / scale; 0 where all codes are to be 0

    OCTAVO_HD static CodeScale of(float scale, float minimum = 0.0f) {
        return {scale, minimum, rounded_quotient(1.0f, scale)};
    }
    OCTAVO_HD static CodeScale spoilt() { return {float_of_bits(kNanBits), 0.0f, float_of_bits(kNanBits)}; }

    // The number that is rounded to a code of 8 bits.
    OCTAVO_HD float operator()(float x) const { return rounded_product(x, inverse); }
    // The number that is rounded to a code of int4.
    OCTAVO_HD float above_minimum(float x) const {
        return rounded_product(rounded_difference(x, minimum), inverse);
    }
};

// The largest number that has a code of int8; Float8Format::kMax is the largest of the float8 types.
constexpr float kLargestInt8 = 127.0f;

// The nearest integer from -127 to 127; NaN becomes 0.
OCTAVO_HD int8_t to_int8(float x) {
    const float bounded = x > kLargestInt8    ? kLargestInt8
                          : x < -kLargestInt8 ? -kLargestInt8
                          : x == x            ? x
                                              : 0.0f;
    return static_cast<int8_t>(rounded_integer(bounded));
}

// The nearest integer from 0 to 15; NaN becomes 0.
OCTAVO_HD uint8_t to_int4(float x) {
    const float bounded = x > 15.0f ? 15.0f : x > 0.0f ? x : 0.0f;
    return static_cast<uint8_t>(rounded_integer(bounded));
}

// The magnitude of a number as an integer that compares in the same order; infinity and NaN are the largest.
OCTAVO_HD uint32_t size_bits(float x) { return bits_of_float(x) & 0x7fffffffu; }

// The scale of a row of int8 or float8, from the largest of its size_bits(). `largest` is the largest number
// that has a code.
OCTAVO_HD CodeScale code_scale_of_row(uint32_t absmax_bits, float largest) {
    if (absmax_bits >= kInfinityBits) return CodeScale::spoilt();
    const float scale = rounded_quotient(float_of_bits(absmax_bits), largest);
    if (bits_of_float(scale) < kLeastScaleBits) return {1.0f, 0.0f, 0.0f};
    return CodeScale::of(scale);
}

// A number as an integer that compares in the same order: -NaN, -infinity, ..., -0, 0, ..., infinity, NaN.
OCTAVO_HD int32_t order_bits(float x) {
    const auto bits = static_cast<int32_t>(bits_of_float(x));
    return bits ^ (bits >> 31 & 0x7fffffff);
}
OCTAVO_HD float float_of_order_bits(int32_t bits) {
    return float_of_bits(static_cast<uint32_t>(bits ^ (bits >> 31 & 0x7fffffff)));
}

// The scale of a row of int4, from the smallest and the largest of its order_bits().
OCTAVO_HD CodeScale int4_scale_of_row(int32_t min_bits, int32_t max_bits) {
    constexpr auto kInfinity = static_cast<int32_t>(kInfinityBits);
    if (max_bits >= kInfinity || min_bits <= ~kInfinity) return CodeScale::spoilt();
    const float min = float_of_order_bits(min_bits), max = float_of_order_bits(max_bits);
    const float step = rounded_quotient(rounded_difference(max, min), 15.0f);
    const float scale = float_of_float16(float16_of_float(step));
    const float minimum = float_of_float16(float16_of_float(min));
    if (size_bits(scale) >= kInfinityBits || size_bits(minimum) >= kInfinityBits) return CodeScale::spoilt();
    const float without_sign = minimum == 0.0f ? 0.0f : minimum;
    if (scale == 0.0f) return {1.0f, without_sign, 0.0f};
    return CodeScale::of(scale, without_sign);
}

// The word that a cache of int4 keeps: two float16, the scale in the lower half, then the minimum.
OCTAVO_HD uint32_t int4_word(const CodeScale& scale) {
    return static_cast<uint32_t>(float16_of_float(scale.scale)) |
           static_cast<uint32_t>(float16_of_float(scale.minimum)) << 16;
}
OCTAVO_HD float scale_of_int4_word(uint32_t word) { return float_of_float16(static_cast<uint16_t>(word)); }
OCTAVO_HD float minimum_of_int4_word(uint32_t word) {
    return float_of_float16(static_cast<uint16_t>(word >> 16));
}

}  // namespace octavo
