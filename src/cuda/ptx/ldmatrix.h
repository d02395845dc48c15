// Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane 8 i + r gives the address of row r of
// matrix i (16 bytes, aligned) in the shared window. Lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of
// row l / 4 of each matrix.
#pragma once

#include "cuda/ptx/cp_async.h"

namespace octavo::cuda::ptx {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&matrices)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(row)
                 : "memory");
}

// The same, with each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&matrices)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(row)
                 : "memory");
}

}  // namespace octavo::cuda::ptx
