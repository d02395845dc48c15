// The signs of two 16-bit numbers in one register.
#pragma once

#include <cstdint>

namespace octavo::cuda::ptx {

// Sets all bits of each half whose sign bit is set, and clears the others.
__device__ __forceinline__ uint32_t negative_halves(uint32_t pair) {
    uint32_t mask;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(pair));  // repeats the signs of bytes 1 and 3
    return mask;
}

}  // namespace octavo::cuda::ptx
