// Collects carries of sums.
#pragma once

#include <cstdint>

namespace octavo::cuda::ptx {

// Returns 2 * bits, plus 1 where x + y is 2^32 or more.
__device__ __forceinline__ uint32_t append_carry(uint32_t bits, uint32_t x, uint32_t y) {
    asm("{\n.reg .u32 sum;\nadd.cc.u32 sum, %1, %2;\naddc.u32 %0, %0, %0;\n}" : "+r"(bits) : "r"(x), "r"(y));
    return bits;
}

}  // namespace octavo::cuda::ptx
