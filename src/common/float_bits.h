// A float32 and its bits.
#pragma once

#include "common/macros.h"

#include <cstdint>
#include <cstring>

namespace octavo {

OCTAVO_HD float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

OCTAVO_HD uint32_t bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// 2^exponent, from -126 to 127.
OCTAVO_HD float power_of_two(int32_t exponent) {
    return float_of_bits(static_cast<uint32_t>(127 + exponent) << 23);
}

}  // namespace octavo
