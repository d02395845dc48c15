// Weights of capped scores. The LSE of queries comes from shared memory, since a product would add it before
// the cap.
#pragma once

#include "common/score.h"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/load_shared.h"
#include "cuda/sm90_backward/tiles.h"
#include "cuda/types.h"
#include "params/attention_backward_params.h"

namespace octavo::cuda {

// Computes weights, and weights times the derivative of the cap, from q . k. Both have 16 bits, since there
// are no registers for more. `lse` is that of each query, in units of log2(e).
template <class T, class Config, int kScores, class Tanh>
__device__ __forceinline__ void weigh_capped_by(uint32_t (&weights)[kScores / 2],
                                                uint32_t (&derivatives)[kScores / 2],
                                                const float (&scores)[kScores],
                                                const ScoreTransform& transform, const float* lse,
                                                Tanh tanh_of) {
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
        const int place = statistic_place<Config::kQueries>(2 * i + 2 * (threadIdx.x % 4));
        const uint2 of_queries = ptx::load_shared_8(ptx::shared_address(lse + place));
#pragma unroll
        for (int j = i; j < i + 4; j += 2) {
            float derivative[2];
            auto weigh = [&](int k, uint32_t lse) {
                const float tanh = tanh_of(scores[j + k] * transform.inner);
                const float weight = ptx::exp2_approx(fmaf(transform.outer, tanh, -__uint_as_float(lse)));
                derivative[k] = fmaf(-weight * tanh, tanh, weight);
                return weight;
            };
            const float even = weigh(0, of_queries.x), odd = weigh(1, of_queries.y);
            weights[j / 2] = pack<T>(even, odd);
            derivatives[j / 2] = pack<T>(derivative[0], derivative[1]);
        }
    }
}

template <class T, class Config, int kScores>
__device__ __forceinline__ void weigh_capped(uint32_t (&weights)[kScores / 2],
                                             uint32_t (&derivatives)[kScores / 2],
                                             const float (&scores)[kScores], const AttentionBackwardParams& p,
                                             const float* lse) {
    const ScoreTransform transform = ScoreTransform::make(p.softmax_scale, p.softcap);
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kScores; ++i) largest = fmaxf(largest, fabsf(scores[i]));
    // Few scores come near the cap, and tanh by an exponential and a quotient takes longer.
    if (__any_sync(~0u, largest * transform.inner > ScoreTransform::kSmall)) {
        weigh_capped_by<T, Config>(weights, derivatives, scores, transform, lse,
                                   [](float x) { return ScoreTransform::tanh(x); });
    } else {
        weigh_capped_by<T, Config>(weights, derivatives, scores, transform, lse,
                                   [](float x) { return ScoreTransform::tanh_of_small(x); });
    }
}

// Turns the derivatives above into gradients of q . k.
template <class T, int kPairs>
__device__ __forceinline__ void multiply_capped(uint32_t (&gradients)[kPairs],
                                                const float (&products)[2 * kPairs]) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
        const float2 derivative = unpack<T>(gradients[j]);
        gradients[j] = pack<T>(derivative.x * products[2 * j], derivative.y * products[2 * j + 1]);
    }
}

}  // namespace octavo::cuda
