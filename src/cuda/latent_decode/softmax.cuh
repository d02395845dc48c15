// A warp's softmax over the keys whose values it multiplies: half of each tile. Both halves have states of
// their own.
#pragma once

#include "common/online_softmax.h"
#include "cuda/latent_decode/tiles.cuh"
#include "cuda/ptx/exp2.h"
#include "cuda/types.h"
#include "cuda/warp.cuh"

#include <cstdint>

namespace octavo::cuda {

// A lane has rows g and g + 8 and, of each eight keys, 2t and 2t + 1.
template <class Config>
class LatentRowsSoftmax {
  public:
    float max[2], sum[2];  // in units of log2(e); the sum is over this lane's keys until sum_over_keys()
    float out[Config::kColumnTiles][4];

    // end_keys: where the keys that rows g and g + 8 see end; factors: what makes scores of products.
    __device__ LatentRowsSoftmax(const int32_t (&end_keys)[2], const float (&factors)[2]) {
        const int lane = threadIdx.x % 32;
        const int own_key = threadIdx.x / 32 / Config::kColumnParts * Config::kPartKeys + 2 * (lane % 4);
        products_ = lane / 4 * Config::kScoreStride + own_key;
        pin_in_register(products_);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            max[i] = -INFINITY;
            sum[i] = 0.0f;
            end_keys_[i] = end_keys[i] - own_key;
            factors_[i] = factors[i];
        }
#pragma unroll
        for (auto& tile : out) {
#pragma unroll
            for (float& x : tile) x = 0.0f;
        }
    }

    // Turns the products of a tile whose first key is `first` into weights: operands a of the second product.
    __device__ void weigh(uint32_t (&weights)[Config::kPartSteps][4],
                          const float (&products)[Config::kDepthParts][kLatentRows][Config::kScoreStride],
                          int32_t first) {
        float scores[2][kScores];
        bool raise = false;
        const bool sees_all = first + Config::kPartKeys <= min(end_keys_[0], end_keys_[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int k = 0; k < kScores; k += 2) {
                const float* const from = &products[0][8 * i][4 * k] + products_;
                const float2 a = *reinterpret_cast<const float2*>(from);
                const float2 b = *reinterpret_cast<const float2*>(from + kLatentRows * Config::kScoreStride);
                scores[i][k] = (a.x + b.x) * factors_[i];
                scores[i][k + 1] = (a.y + b.y) * factors_[i];
            }
            if (!sees_all) {
#pragma unroll
                for (int k = 0; k < kScores; ++k) {
                    if (k / 2 * 8 + k % 2 >= end_keys_[i] - first) scores[i][k] = -INFINITY;
                }
            }
#pragma unroll
            for (int k = 0; k < kScores; ++k) raise = raise || scores[i][k] > max[i] + kSlackLog2;
        }
        if (__any_sync(~0u, raise)) raise_max(scores);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float safe = max[i] == -INFINITY ? 0.0f : max[i];
#pragma unroll
            for (int k = 0; k < kScores; ++k) {
                scores[i][k] = ptx::exp2_approx(scores[i][k] - safe);
                sum[i] += scores[i][k];
            }
#pragma unroll
            for (int k = 0; k < kScores; k += 2)
                weights[k / 4][i + k % 4] = pack<typename Config::Number>(scores[i][k], scores[i][k + 1]);
        }
    }

    __device__ void sum_over_keys() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
            sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
        }
    }

  private:
    static constexpr int kScores = Config::kPartKeys / 4;  // of a lane, in each of its rows

    __device__ void raise_max(const float (&scores)[2][kScores]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float raised = scores[i][0];
#pragma unroll
            for (int k = 1; k < kScores; ++k) raised = fmaxf(raised, scores[i][k]);
            raised = fmaxf(raised, __shfl_xor_sync(~0u, raised, 1));
            raised = fmaxf(max[i], fmaxf(raised, __shfl_xor_sync(~0u, raised, 2)));
            const float factor = raised == -INFINITY ? 1.0f : ptx::exp2_approx(max[i] - raised);
            max[i] = raised;
            sum[i] *= factor;
#pragma unroll
            for (auto& tile : out) {
                tile[2 * i] *= factor;
                tile[2 * i + 1] *= factor;
            }
        }
    }

    int products_;         // where this lane's products lie
    int32_t end_keys_[2];  // counted from this lane's first key of a tile
    float factors_[2];
};

}  // namespace octavo::cuda
