// The two matrix products of attention, on tiles in shared memory, for the kRowTiles x 16 rows of one warp.
// Results lie in the accumulator layout of ptx/mma.h: of row tile t and column group i, element j is row
// 16 t + lane / 4 (+ 8 for j >= 2), column 8 i + 2 (lane % 4) + j % 2.
#pragma once

#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/types.h"

namespace octavo::cuda {

// This lane's address for ldmatrix_x4 of 16 rows of a tile, in the order of operand a, or of operand b
// transposed: the four matrices are rows 0-7 and rows 8-15 of the lower eight columns, then of the upper
// eight.
template <class Config, class T>
__device__ __forceinline__ uint32_t rows_address(const T* tile) {
    const int lane = threadIdx.x % 32;
    return ptx::shared_address(tile + lane % 16 * Config::kRowStride + lane / 16 * 8);
}
// The same in the order of operand b: rows 0-7 of the lower and of the upper columns, then rows 8-15.
template <class Config, class T>
__device__ __forceinline__ uint32_t columns_address(const T* tile) {
    const int lane = threadIdx.x % 32;
    return ptx::shared_address(tile + (lane / 16 * 8 + lane % 8) * Config::kRowStride + lane / 8 % 2 * 8);
}

// Computes scores = q k^T over the warp's columns. `q` is a rows_address, `k` a columns_address.
template <class T, class Config>
__device__ __forceinline__ void multiply_q_k(float (&scores)[Config::kRowTiles][Config::kKeys / 8][4],
                                             uint32_t q, uint32_t k) {
#pragma unroll
    for (int t = 0; t < Config::kRowTiles; ++t) {
#pragma unroll
        for (int i = 0; i < Config::kKeys / 8; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) scores[t][i][j] = 0.0f;
        }
    }
#pragma unroll
    for (int step = 0; step < Config::kWarpColumns / 16; ++step) {
        uint32_t a[Config::kRowTiles][4];
#pragma unroll
        for (int t = 0; t < Config::kRowTiles; ++t)
            ptx::ldmatrix_x4(a[t], q + 2 * (16 * t * Config::kRowStride + 16 * step));
#pragma unroll
        for (int key = 0; key < Config::kKeys; key += 16) {
            uint32_t b[4];
            ptx::ldmatrix_x4(b, k + 2 * (key * Config::kRowStride + 16 * step));
#pragma unroll
            for (int t = 0; t < Config::kRowTiles; ++t) {
                ptx::mma_m16n8k16<T>(scores[t][key / 8], a[t], b[0], b[1]);
                ptx::mma_m16n8k16<T>(scores[t][key / 8 + 1], a[t], b[2], b[3]);
            }
        }
    }
}

// Adds weights v to out for 16 keys and the warp's columns. `a`: the weights as operand a. `v`: the
// rows_address of the first of the keys.
template <class T, class Config>
__device__ __forceinline__ void multiply_p_v(float (&out)[Config::kRowTiles][Config::kWarpColumns / 8][4],
                                             const uint32_t (&a)[Config::kRowTiles][4], uint32_t v) {
#pragma unroll
    for (int step = 0; step < Config::kWarpColumns / 16; ++step) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v + 32 * step);
#pragma unroll
        for (int t = 0; t < Config::kRowTiles; ++t) {
            ptx::mma_m16n8k16<T>(out[t][2 * step], a[t], b[0], b[1]);
            ptx::mma_m16n8k16<T>(out[t][2 * step + 1], a[t], b[2], b[3]);
        }
    }
}

}  // namespace octavo::cuda
