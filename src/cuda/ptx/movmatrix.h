// Transposes an 8 x 8 matrix of 16-bit elements that is spread over a warp: lane l holds elements 2 (l % 4)
// and 2 (l % 4) + 1 of row l / 4 (sm_75).
#pragma once

#include <cstdint>

namespace octavo::cuda::ptx {

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t elements) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(elements));
    return transposed;
}

}  // namespace octavo::cuda::ptx
