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

}  // namespace octavo
