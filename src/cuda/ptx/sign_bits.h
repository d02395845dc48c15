// Signs of two 16-bit numbers in one register.
#pragma once

#include <cstdint>

namespace octavo::cuda::ptx {

// All bits of each half whose sign is set.
__device__ __forceinline__ uint32_t negative_halves(uint32_t pair) {
    uint32_t mask;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(pair));  // bytes 1 and 3: their sign, eight times
    return mask;
}

}  // namespace octavo::cuda::ptx
