// Stores four 8 x 8 matrices of 16-bit elements to shared memory: the inverse of ldmatrix_x4 (sm_90).
#pragma once

#include "cuda/ptx/cp_async.h"

namespace octavo::cuda::ptx {

__device__ __forceinline__ void stmatrix_x4(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2,
                                            uint32_t m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0),
                 "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}
__device__ __forceinline__ void stmatrix_x4(void* row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
    stmatrix_x4(shared_address(row), m0, m1, m2, m3);
}

}  // namespace octavo::cuda::ptx
