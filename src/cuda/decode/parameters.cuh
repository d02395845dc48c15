// A kernel's parameters in the constant cache.
#pragma once

#include "ops/forward_params.h"

#include <cstdint>

namespace octavo::cuda {

// Brings parameters into the constant cache: each warp waits for one line, not all warps for each. The
// addresses are constants, since indexed reads go through another cache.
__device__ __forceinline__ void touch_parameters(const ForwardParams& p) {
    constexpr int kLineWords = 16;
    const int32_t* const words = reinterpret_cast<const int32_t*>(&p);
#pragma unroll
    for (int line = 0; line < static_cast<int>(sizeof(p) / sizeof(int32_t)) / kLineWords; ++line) {
        if (threadIdx.x / 32 == line) asm volatile("" ::"r"(words[line * kLineWords]));
    }
}

}  // namespace octavo::cuda
