// The 8-bit floating-point types of "FP8 Formats for Deep Learning" (Micikevicius et al. 2022,
// arXiv:2209.05433): e4m3fn (no infinities, one NaN a sign) and e5m2. Rounding is to nearest even, and values
// beyond the largest finite number become that number; NaN stays NaN.
#pragma once

#include "common/macros.h"

#include <cstdint>
#include <cstring>

namespace octavo {

template <int kMantissaBits_>
struct Float8Format {
    static constexpr int kMantissaBits = kMantissaBits_;
    static constexpr int kExponentBits = 7 - kMantissaBits;
    static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
    static constexpr int kShift = 23 - kMantissaBits;  // of a mantissa in float32's
    // e4m3fn uses its last exponent for numbers, all but one; e5m2 has infinities there, as float16 has.
    static constexpr float kMax = kMantissaBits == 3 ? 448.0f : 57344.0f;
    static constexpr uint32_t kMaxCode = kMantissaBits == 3 ? 0x7e : 0x7b;
    static constexpr uint32_t kNan = 0x7f;
    static constexpr uint32_t kSmallestNormal = 1u << kMantissaBits;
    // As float32: the smallest normal number, and the power of two whose neighbours are as far apart as the
    // subnormal numbers, so that a sum with it is rounded to their grid, and its last bits are their code.
    static constexpr uint32_t kSmallestNormalBits = (127u - kBias + 1u) << 23;
    static constexpr uint32_t kGridBits = (127u - kBias + 1u + kShift) << 23;
};
using E4m3 = Float8Format<3>;
using E5m2 = Float8Format<2>;

OCTAVO_HD uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
OCTAVO_HD float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// The code of the number nearest to x.
template <class Format>
OCTAVO_HD uint8_t to_float8(float x) {
    const uint32_t sign = float_to_bits(x) >> 24 & 0x80u;
    const uint32_t size = float_to_bits(x) & 0x7fffffffu;
    if (size > 0x7f800000u) return static_cast<uint8_t>(sign | Format::kNan);
    if (size >= float_to_bits(Format::kMax)) return static_cast<uint8_t>(sign | Format::kMaxCode);
    if (size < Format::kSmallestNormalBits) {
        const float sum = bits_to_float(size) + bits_to_float(Format::kGridBits);
        return static_cast<uint8_t>(sign | (float_to_bits(sum) - Format::kGridBits));
    }
    const uint32_t half = (1u << (Format::kShift - 1)) - 1u;
    const uint32_t rounded = (size + half + (size >> Format::kShift & 1u)) >> Format::kShift;
    return static_cast<uint8_t>(sign | (rounded - ((127u - Format::kBias) << Format::kMantissaBits)));
}

template <class Format>
OCTAVO_HD float float8_to_float(uint8_t code) {
    const uint32_t sign = (code & 0x80u) << 24, size = code & 0x7fu;
    if (size > Format::kMaxCode) {
        const bool infinite = size == Format::kMaxCode + 1 && Format::kMaxCode + 1 != Format::kNan;
        return bits_to_float(sign | (infinite ? 0x7f800000u : 0x7fc00000u));
    }
    const uint32_t normal = (size << Format::kShift) + ((127u - Format::kBias) << 23);
    const float subnormal = bits_to_float(Format::kGridBits + size) - bits_to_float(Format::kGridBits);
    return bits_to_float(sign | (size < Format::kSmallestNormal ? float_to_bits(subnormal) : normal));
}

}  // namespace octavo
