// Converts between float32 and the bits of a float16, rounding to nearest even.
#pragma once

#include "common/float_bits.h"

#include <cstdint>

namespace octavo {

// The methods are F. Giesen's "half_to_float_fast5" and "float_to_half_fast3_rtne" (public domain, 2012 and
// 2016).
OCTAVO_HD float float_of_float16(uint16_t x) {
    uint32_t bits = (x & 0x7fffu) << 13;
    uint32_t exponent = bits & 0x0f800000u;
    bits += (127u - 15u) << 23;
    if (exponent == 0x0f800000u) bits += (128u - 16u) << 23;  // infinity, NaN
    if (exponent == 0) bits = bits_of_float(float_of_bits(bits + (1u << 23)) - float_of_bits(113u << 23));
    return float_of_bits(bits | (x & 0x8000u) << 16);
}

OCTAVO_HD uint16_t float16_of_float(float x) {
    uint32_t sign = bits_of_float(x) & 0x80000000u;
    uint32_t bits = bits_of_float(x) ^ sign;
    if (bits >= (127u + 16u) << 23) {  // too large, infinity, NaN
        bits = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (bits < 113u << 23) {  // below the smallest normal number: the addition rounds
        constexpr uint32_t kMagic = (127u - 15u + 23u - 10u + 1u) << 23;
        bits = bits_of_float(float_of_bits(bits) + float_of_bits(kMagic)) - kMagic;
    } else {
        bits = (bits + ((15u - 127u) << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    }
    return static_cast<uint16_t>(bits | sign >> 16);
}

}  // namespace octavo
