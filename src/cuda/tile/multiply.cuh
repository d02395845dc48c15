// The two matrix products of attention, on tiles in shared memory, for one warp's 16 rows. Results lie in
// the accumulator layout of ptx/mma.h: element j of column group i is row lane / 4 (+ 8 for j >= 2), column
// 8 i + 2 (lane % 4) + j % 2.
#pragma once

#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/types.h"

namespace octavo::cuda {

// scores[16 x kKeys] = q k^T for this warp's 16 rows.
template <class T, class Config>
__device__ __forceinline__ void multiply_q_k(float (&scores)[Config::kKeys / 8][4], const T* q_rows,
                                             const T* k) {
    const int lane = threadIdx.x % 32;
    // Rows of q: matrices (0-7, low), (8-15, low), (0-7, high), (8-15, high) by columns of eight.
    const T* q_address = q_rows + lane % 16 * Config::kRowStride + lane / 16 * 8;
    // Rows of k: (0-7, low), (0-7, high), (8-15, low), (8-15, high).
    const T* k_address = k + (lane / 16 * 8 + lane % 8) * Config::kRowStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int tile = 0; tile < Config::kKeys / 8; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[tile][i] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < Config::kHeadDim; d += 16) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, q_address + d);
#pragma unroll
        for (int key = 0; key < Config::kKeys; key += 16) {
            uint32_t b[4];
            ptx::ldmatrix_x4(b, k_address + key * Config::kRowStride + d);
            ptx::mma_m16n8k16<T>(scores[key / 8], a, b[0], b[1]);
            ptx::mma_m16n8k16<T>(scores[key / 8 + 1], a, b[2], b[3]);
        }
    }
}

// out[16 x kHeadDim] += weights v for this warp's 16 rows; weights are already in the layout of operand a.
template <class T, class Config>
__device__ __forceinline__ void multiply_p_v(float (&out)[Config::kHeadDim / 8][4],
                                             const float (&weights)[Config::kKeys / 8][4], const T* v) {
    const int lane = threadIdx.x % 32;
    // Rows of v: (0-7, low), (8-15, low), (0-7, high), (8-15, high), each transposed.
    const T* v_address = v + lane % 16 * Config::kRowStride + lane / 16 * 8;
#pragma unroll
    for (int key = 0; key < Config::kKeys; key += 16) {
        const float (&low)[4] = weights[key / 8];
        const float (&high)[4] = weights[key / 8 + 1];
        const uint32_t a[4] = {pack<T>(low[0], low[1]), pack<T>(low[2], low[3]), pack<T>(high[0], high[1]),
                               pack<T>(high[2], high[3])};
#pragma unroll
        for (int d = 0; d < Config::kHeadDim; d += 16) {
            uint32_t b[4];
            ptx::ldmatrix_x4_trans(b, v_address + key * Config::kRowStride + d);
            ptx::mma_m16n8k16<T>(out[d / 8], a, b[0], b[1]);
            ptx::mma_m16n8k16<T>(out[d / 8 + 1], a, b[2], b[3]);
        }
    }
}

}  // namespace octavo::cuda
