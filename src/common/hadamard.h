// The rotation of rows by a Hadamard matrix of Sylvester's construction, divided by the square root of its
// size: it keeps dot products, is its own inverse, and spreads what one number holds over all (QuIP#, Tseng
// et al. 2024, arXiv:2402.04396; QuaRot, Ashkboos et al. 2024, arXiv:2404.00456).
//
// In a row of n numbers, each block of hadamard_size(n) numbers is rotated by itself; where n is a power of
// two, there is one block. For each distance 1, 2, 4, ... below the size, numbers a and b at that distance
// become a + b and a - b; in the end all are multiplied by hadamard_factor(size). Every backend rounds alike.
#pragma once

#include "common/float_bits.h"
#include "common/rounded.h"

#include <cstdint>

namespace octavo {

// The largest power of two that divides the length of a row.
OCTAVO_HD int32_t hadamard_size(int32_t length) { return length & -length; }

// 1 / sqrt(size), rounded.
OCTAVO_HD float hadamard_factor(int32_t size) {
    constexpr float kSqrt2 = 1.4142135623730951f;
    int32_t exponent = 0;
    while (size >> (exponent + 1)) ++exponent;
    const float power = power_of_two(-(exponent + 1) / 2);
    return exponent % 2 == 0 ? power : kSqrt2 * power;
}

// Rotates a row in host memory, in place.
inline void hadamard_rotate(float* row, int32_t length) {
    const int32_t size = hadamard_size(length);
    for (int32_t distance = 1; distance < size; distance *= 2) {
        for (int32_t i = 0; i < length; ++i) {
            if (i & distance) continue;
            const float a = row[i], b = row[i + distance];
            row[i] = rounded_sum(a, b);
            row[i + distance] = rounded_difference(a, b);
        }
    }
    const float factor = hadamard_factor(size);
    for (int32_t i = 0; i < length; ++i) row[i] = rounded_product(row[i], factor);
}

}  // namespace octavo
