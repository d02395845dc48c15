// Numbers of the 16-bit types as types of their own, to float32 and back, rounding to nearest even.
#pragma once

#include "common/float16.h"

#include <cstdint>

namespace octavo::cpu {

struct Float16 {
    uint16_t bits;
};

struct BFloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(Float16 x) { return float_of_float16(x.bits); }

inline void from_float(float x, float& out) { out = x; }

inline void from_float(float x, BFloat16& out) {
    uint32_t bits = bits_of_float(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out.bits = static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40u : rounded);
}

inline void from_float(float x, Float16& out) { out.bits = float16_of_float(x); }

}  // namespace octavo::cpu
