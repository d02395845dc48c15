// The 8-bit floating-point types of "FP8 Formats for Deep Learning" (Micikevicius et al. 2022,
// arXiv:2209.05433): e4m3fn (no infinities, one NaN a sign) and e5m2. Rounding is to nearest even, and values
// beyond the largest finite number become that number; NaN stays NaN, without its sign.
#pragma once

#include "common/float_bits.h"

#include <cstdint>

namespace octavo {

template <int kMantissaBits_>
struct Float8Format {
    static constexpr int kMantissaBits = kMantissaBits_;
    static constexpr int kExponentBits = 7 - kMantissaBits;
    static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
    static constexpr int kShift = 23 - kMantissaBits;  // from the last bit of float32's mantissa to ours
    // e4m3fn uses its last exponent for numbers, except for one code; e5m2 has infinities there, as float16
    // has.
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

// The code of the number nearest to x.
template <class Format>
OCTAVO_HD uint8_t to_float8(float x) {
    const uint32_t sign = bits_of_float(x) >> 24 & 0x80u;
    const uint32_t size = bits_of_float(x) & 0x7fffffffu;
    if (size > 0x7f800000u) return static_cast<uint8_t>(Format::kNan);
    if (size >= bits_of_float(Format::kMax)) return static_cast<uint8_t>(sign | Format::kMaxCode);
    if (size < Format::kSmallestNormalBits) {
        const float sum = float_of_bits(size) + float_of_bits(Format::kGridBits);
        return static_cast<uint8_t>(sign | (bits_of_float(sum) - Format::kGridBits));
    }
    const uint32_t below_half = (1u << (Format::kShift - 1)) - 1u, is_odd = size >> Format::kShift & 1u;
    const uint32_t rounded = (size + below_half + is_odd) >> Format::kShift;
    return static_cast<uint8_t>(sign | (rounded - ((127u - Format::kBias) << Format::kMantissaBits)));
}

template <class Format>
OCTAVO_HD float float8_to_float(uint8_t code) {
    const uint32_t sign = (code & 0x80u) << 24, size = code & 0x7fu;
    if (size > Format::kMaxCode) {
        const bool infinite = size == Format::kMaxCode + 1 && Format::kMaxCode + 1 != Format::kNan;
        return float_of_bits(sign | (infinite ? 0x7f800000u : 0x7fc00000u));
    }
    const uint32_t normal = (size << Format::kShift) + ((127u - Format::kBias) << 23);
    const float subnormal = float_of_bits(Format::kGridBits + size) - float_of_bits(Format::kGridBits);
    return float_of_bits(sign | (size < Format::kSmallestNormal ? bits_of_float(subnormal) : normal));
}

}  // namespace octavo
