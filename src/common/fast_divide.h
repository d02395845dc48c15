// Division by a number known only at run time, without the division (Granlund and Montgomery 1994).
#pragma once

#include "common/macros.h"

#include <cstdint>

namespace octavo {

struct FastDivide {
    uint32_t divisor, multiplier, shift;

    static FastDivide by(uint32_t divisor) {
        uint32_t shift = 0;
        while ((uint64_t{1} << shift) < divisor) ++shift;
        const uint64_t excess = (uint64_t{1} << shift) - divisor;
        return {divisor, static_cast<uint32_t>((excess << 32) / divisor + 1), shift};
    }

    // Requires 0 <= n < 2^31.
    OCTAVO_HD int32_t quotient(int32_t n) const {
        const uint32_t x = static_cast<uint32_t>(n);
        const uint32_t high = static_cast<uint32_t>((uint64_t{x} * multiplier) >> 32);
        return static_cast<int32_t>((high + x) >> shift);
    }
    OCTAVO_HD int32_t remainder(int32_t n) const { return n - quotient(n) * static_cast<int32_t>(divisor); }
};

}  // namespace octavo
