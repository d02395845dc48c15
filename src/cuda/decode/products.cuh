// The products of a warp with a block of 16-bit keys and values, by mma.sync: S^T = K Q^T and O^T = V^T P^T.
#pragma once

#include "common/score.h"
#include "cuda/decode/rows.cuh"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/transposed_softmax.cuh"
#include "cuda/warp.cuh"

namespace octavo::cuda {

template <class T, class Config>
class Products {
    static constexpr int kRowTiles = Config::kRowTiles, kDimTiles = Config::kHeadDim / 16;

  public:
    using Weight = T;
    using Softmax = TransposedSoftmax<kRowTiles, kDimTiles>;

    __device__ Products() {
        const int lane = threadIdx.x % 32;
        a_ = KeyRows<Config>::offset(lane % 16, lane / 16);
        a_transposed_ = ValueRows<Config>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        b_ = QueryRows<Config>::offset(lane % 8, lane / 8);
        pin_in_register(a_);
        pin_in_register(a_transposed_);
        pin_in_register(b_);
    }

    // Computes the dot products of queries and keys.
    __device__ void multiply_q_k(float (&scores)[kRowTiles][4], QueryRows<Config> q, KeyRows<Config> k,
                                 int) const {
        float odd[kRowTiles][4];  // a second chain of products
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[r][e] = odd[r][e] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < kDimTiles; j += 2) {
            uint32_t a[2][4];
            load_a(a[0], k, j);
            load_a(a[1], k, j + 1);
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                uint32_t b[4];
                load_b(b, q, r, j / 2);
                ptx::mma_m16n8k16<T>(scores[r], a[0], b[0], b[1]);
                ptx::mma_m16n8k16<T>(kRowTiles == 1 ? odd[r] : scores[r], a[1], b[2], b[3]);
            }
        }
        if (kRowTiles == 1) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[0][e] += odd[0][e];
        }
    }

    // Turns dot products into scores in units of log2(e), without the terms that depend on positions.
    __device__ void transform(float (&scores)[kRowTiles][4], const ScoreTransform& transform) const {
        if (OCTAVO_RARE(transform.has_softcap)) {
            Softmax::for_each_score(scores, [&](float& score, int, int) { score = transform(score); });
        } else {
            Softmax::for_each_score(scores, [&](float& score, int, int) { score *= transform.inner; });
        }
    }

    __device__ void multiply_p_v(float (&out)[kRowTiles][kDimTiles][4],
                                 const uint32_t (&weights)[kRowTiles][2], ValueRows<Config> v, int) const {
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
            uint32_t a[4];
            load_a_transposed(a, v, d);
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                ptx::mma_m16n8k16<T>(out[r][d], a, weights[r][0], weights[r][1]);
            }
        }
    }

  private:
    // Loads operand a of a product over dims: 16 rows by 16 dims from 16 j on.
    __device__ void load_a(uint32_t (&words)[4], KeyRows<Config> rows, int j) const {
        ptx::ldmatrix_x4(words, KeyRows<Config>::advance(rows.address + a_, 2 * j));
    }
    // Loads operand a of a product over rows: 16 dims from 16 j on by 16 rows.
    __device__ void load_a_transposed(uint32_t (&words)[4], ValueRows<Config> rows, int j) const {
        ptx::ldmatrix_x4_trans(words, ValueRows<Config>::advance(rows.address + a_transposed_, 2 * j));
    }
    // Loads operand b of two products over dims: 8 rows from 8 tile on, and 32 dims from 32 j on.
    __device__ void load_b(uint32_t (&words)[4], QueryRows<Config> rows, int tile, int j) const {
        ptx::ldmatrix_x4(
            words, QueryRows<Config>::advance(rows.address + b_, 4 * j) + 128 * tile * Config::kRowChunks);
    }

    uint32_t a_, a_transposed_, b_;  // the places from which this lane reads operands
};

}  // namespace octavo::cuda
