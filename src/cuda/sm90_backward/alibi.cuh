// ALiBi. The product that adds the statistics of queries to scores adds it as well: distances within the
// tiles are part of that product, and the distance between the tile's first query and its first key is one
// number for each step (docs/kernels/attention_backward.md).
//
// Symmetric ALiBi, -slope |q_pos - k_pos|, has the same bias where no key of a step lies behind its queries,
// and the negative one where all do: there the loader brings other terms, with the negative slope. Steps
// between, on the diagonal, are corrected for each score whose key lies behind its query.
//
//                queries  0  1  2  3
//     keys  0             \  +  +  +       +  one-sided
//           1             -  \  +  +       -  the negative of it
//           2             -  -  \  +       \  one-sided, and corrected
#pragma once

#include "common/score.h"
#include "cuda/sm90_backward/shared.cuh"
#include "cuda/warp.cuh"

namespace octavo::cuda {

// On which side of a step's queries the keys of the CTA lie. With one-sided ALiBi this does not matter.
enum class KeySide { before, behind, both };

template <class Config, class Step>
__device__ __forceinline__ KeySide side_of_keys(const Sm90BackwardWork<Config>& tile, const Step& step) {
    if constexpr (!Config::kSymmetric) {
        return KeySide::before;
    } else {
        const int32_t distance = tile.first_key - tile.seq.q_pos(step.tile * Config::kQueries);
        if (distance >= Config::kQueries - 1) return KeySide::behind;
        return distance <= 1 - Config::kKeys ? KeySide::before : KeySide::both;
    }
}

// Returns the bias between the tile's first query and its first key, in units of log2(e). `tile` is `work` in
// shared memory, for what there are no registers to keep; below, too.
template <class Config, class Step>
__device__ __forceinline__ float bias_between(const AttentionBackwardParams& p,
                                              const Sm90BackwardWork<Config>& work,
                                              const Sm90BackwardWork<Config>& tile, const Step& step) {
    if constexpr (!Config::kAlibi) {
        return 0.0f;
    } else {
        const float slope = p.alibi_slopes[work.batch * p.alibi_batch_stride + step.head] * kLog2e;
        const float bias =
            alibi_bias(slope, tile.seq.q_pos(0) + step.tile * Config::kQueries, tile.first_key);
        return side_of_keys(tile, step) == KeySide::behind ? -bias : bias;
    }
}

// The terms of scores for a step, as prepare.cuh leaves them.
template <class Config, class Step>
__device__ __forceinline__ const void* terms_of_scores(const AttentionBackwardParams& p,
                                                       const Sm90BackwardLaunch& plan,
                                                       const Sm90BackwardWork<Config>& tile,
                                                       const Step& step) {
    if constexpr (Config::kSymmetric) {
        if (side_of_keys(tile, step) == KeySide::behind)
            return static_cast<const BfloatTerms*>(plan.lse) + num_terms(p, plan);
    }
    return plan.lse;
}

// The way from the query of a lane's first score to its key, which is the lane's key `row`.
template <class Config, class Step>
__device__ __forceinline__ int32_t way_to_first_key(const Sm90BackwardWork<Config>& tile, const Step& step,
                                                    int row) {
    return tile.first_key + row -
           (tile.seq.q_pos(0) + step.tile * Config::kQueries + 2 * static_cast<int32_t>(threadIdx.x % 4));
}

// How much longer the way of its score `i` is than that of its first one.
__device__ __forceinline__ float way_between(int i) {
    return static_cast<float>(i / 2 % 2 * 8 - (i / 4 * 8 + i % 2));
}

// On the diagonal, makes one-sided ALiBi symmetric in scores that are not scaled yet. `row` is the lane's
// first key.
template <class Config, class Step, int kScores>
__device__ __forceinline__ void bend_bias(float (&scores)[kScores], const AttentionBackwardParams& p,
                                          const Sm90BackwardWork<Config>& work,
                                          const Sm90BackwardWork<Config>& tile, const Step& step, int row) {
    if (side_of_keys(tile, step) != KeySide::both) return;
    const float slope = p.alibi_slopes[work.batch * p.alibi_batch_stride + step.head] / p.softmax_scale;
    const auto way = static_cast<float>(way_to_first_key(tile, step, row));
#pragma unroll
    for (int i = 0; i < kScores; ++i)
        scores[i] = fmaf(-2.0f * slope, fmaxf(way + way_between(i), 0.0f), scores[i]);
}

// A lane's part of the gradient of a head's slope: the sum of gradients of scores times the way from the
// query to the key; with symmetric ALiBi, times the negative of its length.
template <class Config>
class SlopeGradient {
  public:
    // Adds what one step gives. After the last step of a head, it writes the warp's sum to workspace. `row`
    // is the lane's first key.
    template <int kScores>
    __device__ __forceinline__ void add(const float (&weights)[kScores], const float (&products)[kScores],
                                        const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan,
                                        const Sm90BackwardWork<Config>& work,
                                        const Sm90BackwardWork<Config>& tile,
                                        const Sm90BackwardStep<Config>& step, int row) {
        const auto way = static_cast<float>(way_to_first_key(tile, step, row));
        if constexpr (Config::kSymmetric) {
#pragma unroll
            for (int i = 0; i < kScores; ++i)
                sum_ = fmaf(weights[i] * products[i], -fabsf(way + way_between(i)), sum_);
        } else {
            float sums[2] = {};     // a sum for each key
            float by_query = 0.0f;  // the sum of both, times the query's place in its tile
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                const float gradient = weights[i] * products[i];
                sums[i / 2 % 2] += gradient;
                by_query = fmaf(gradient, static_cast<float>(i / 4 * 8 + i % 2), by_query);
            }
            sum_ += way * (sums[0] + sums[1]) + 8.0f * sums[1] - by_query;
        }
        if (step.tile + 1 < work.first_tile + work.num_tiles) return;
        const float of_warp = warp_sum(sum_);
        if (threadIdx.x % 32 == 0) *place(p, plan, work, step.head, row / 16) = of_warp;
        sum_ = 0.0f;
    }

    // Where a warp of consumers leaves its sum.
    __device__ static float* place(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan,
                                   const Sm90BackwardWork<Config>& work, int32_t head, int warp) {
        const int32_t tile = work.first_key / Config::kKeys;
        return plan.slopes.of(p, head, work.batch) + tile * Config::kConsumerWarps + warp;
    }

  private:
    float sum_ = 0.0f;  // the sum of the head under way
};

// Leaves zeros as the gradients of slopes, where no query sees a key of the tile.
template <class Config>
__device__ __forceinline__ void leave_no_slope_gradients(const AttentionBackwardParams& p,
                                                         const Sm90BackwardLaunch& plan,
                                                         const Sm90BackwardWork<Config>& work, int group) {
    if (threadIdx.x % 32 != 0) return;
    for (int32_t i = 0; i < work.group_size; ++i)
        *SlopeGradient<Config>::place(p, plan, work, work.kv_head * work.group_size + i,
                                      4 * group + threadIdx.x % 128 / 32) = 0.0f;
}

}  // namespace octavo::cuda
