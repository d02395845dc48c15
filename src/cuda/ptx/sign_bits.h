// Masks from bits of a register.
#pragma once

#include <cstdint>

namespace octavo::cuda::ptx {

// Sets all bits of the lower half where the highest bit of byte `kByte` of `low` is set, and those of the
// upper half by the same bit of `high`. It clears the others.
template <int kByte>
__device__ __forceinline__ uint32_t spread_signs(uint32_t low, uint32_t high) {
    constexpr int kOfLow = 8 + kByte, kOfHigh = 12 + kByte;  // 8: repeat the sign
    uint32_t mask;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(low), "r"(high), "n"(kOfLow * 0x11 + kOfHigh * 0x1100));
    return mask;
}

}  // namespace octavo::cuda::ptx
