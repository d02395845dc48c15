// Weights of capped scores. The LSE of queries comes from shared memory, since a product would add it before
// the cap.
#pragma once

#include "common/score.h"
#include "cuda/ptx/exp2.h"
#include "cuda/sm90_backward/statistics.cuh"
#include "cuda/types.h"
#include "params/attention_backward_params.h"

#include <cmath>
#include <type_traits>

namespace octavo::cuda {

// From q . k to the exponent of a weight and to the derivative of the cap. A capped score is
// softcap * tanh(u), with u = inner * q . k.
struct CappedScore {
    float exponent, derivative;

    __device__ static CappedScore make(const ScoreTransform& transform, float tanh, float lse) {
        return {fmaf(transform.outer, tanh, -lse), fmaf(-tanh, tanh, 1.0f)};
    }
};

// The same for |u| <= 0.2, far from the cap: tanh within 2^-18.5, and its derivative, a polynomial of its
// own, within 2^-12.9.
class FarCappedScores {
  public:
    __device__ explicit FarCappedScores(const ScoreTransform& transform)
        : FarCappedScores(transform.inner * transform.outer, transform.inner * transform.inner) {}
    // Whether it serves scores of up to |u| = largest.
    __device__ bool serves(float largest) const { return largest <= 0.2f && fabsf(third_) < INFINITY; }
    __device__ __forceinline__ CappedScore operator()(float qk, float lse) const {
        const float z = qk * qk;
        return {fmaf(qk, fmaf(z, third_, first_), -lse), fmaf(z, square_, 0.99987109f)};
    }

  private:
    __device__ FarCappedScores(float scale, float square)
        : first_(0.99993546f * scale),
          third_(-0.32679203f * scale * square),
          square_(-0.97392542f * square) {}

    const float first_, third_, square_;
};

// Multiplies two pairs of bfloat16 numbers.
__device__ __forceinline__ uint32_t multiply_bfloat16_pairs(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Computes weights, and in place of q . k weights times the derivative of the cap. `lse` is that of each
// query, in units of log2(e).
template <class T, class Config, int kScores, class Cap>
__device__ __forceinline__ void weigh_capped_by(uint32_t (&weights)[kScores / 2],
                                                uint32_t (&gradients)[kScores / 2], float (&scores)[kScores],
                                                const LaneStatistics<Config>& lse, const Cap& cap) {
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
        const float4 of_queries = lse.of(i / 8);
        const float lses[4] = {of_queries.x, of_queries.y, of_queries.z, of_queries.w};
#pragma unroll
        for (int j = i; j < i + 8; j += 2) {
            float weight[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const CappedScore score = cap(scores[j + k], lses[(j - i) / 4 * 2 + k]);
                weight[k] = ptx::exp2_approx(score.exponent);
                scores[j + k] = weight[k] * score.derivative;
            }
            weights[j / 2] = pack<T>(weight[0], weight[1]);
            if constexpr (Config::kPacked) gradients[j / 2] = pack<T>(scores[j], scores[j + 1]);
        }
    }
}

template <class T, class Config, int kScores>
__device__ __forceinline__ void weigh_capped(uint32_t (&weights)[kScores / 2],
                                             uint32_t (&gradients)[kScores / 2], float (&scores)[kScores],
                                             const AttentionBackwardParams& p, const float* tile) {
    const ScoreTransform transform = ScoreTransform::make(p.softmax_scale, p.softcap);
    const LaneStatistics<Config> lse(tile);
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kScores; ++i) largest = fmaxf(largest, fabsf(scores[i]));
    largest *= transform.inner;
    // Few scores come near the cap.
    const FarCappedScores far(transform);
    if (!__any_sync(~0u, !far.serves(largest))) {
        weigh_capped_by<T, Config>(weights, gradients, scores, lse, far);
    } else if (!__any_sync(~0u, largest > ScoreTransform::kSmall)) {
        weigh_capped_by<T, Config>(weights, gradients, scores, lse, [&](float qk, float lse) {
            return CappedScore::make(transform, ScoreTransform::tanh_of_small(qk * transform.inner), lse);
        });
    } else {
        weigh_capped_by<T, Config>(weights, gradients, scores, lse, [&](float qk, float lse) {
            return CappedScore::make(transform, ScoreTransform::tanh(qk * transform.inner), lse);
        });
    }
}

// Computes the gradients of q . k from weights times the derivative of the cap.
template <class T, class Config, int kPairs>
__device__ __forceinline__ void multiply_capped(uint32_t (&gradients)[kPairs],
                                                const float (&weights)[2 * kPairs],
                                                const float (&products)[2 * kPairs]) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
        const float even = products[2 * j], odd = products[2 * j + 1];
        if constexpr (!Config::kPacked) {
            gradients[j] = pack<T>(weights[2 * j] * even, weights[2 * j + 1] * odd);
        } else if constexpr (std::is_same_v<T, bfloat16>) {
            // Products of 16 bits cost three instructions less of five. In float16 they might overflow.
            gradients[j] = multiply_bfloat16_pairs(gradients[j], pack<T>(even, odd));
        } else {
            const float2 weight = unpack<T>(gradients[j]);
            gradients[j] = pack<T>(weight.x * even, weight.y * odd);
        }
    }
}

}  // namespace octavo::cuda
