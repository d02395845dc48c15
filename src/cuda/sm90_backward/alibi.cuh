// ALiBi. The product that adds the statistics of queries to scores adds it as well: distances within the
// tiles are part of that product, and the distance between the tile's first query and its first key is one
// number for each step (docs/kernels/attention_backward.md).
#pragma once

#include "common/score.h"
#include "cuda/sm90_backward/shared.cuh"
#include "cuda/warp.cuh"

namespace octavo::cuda {

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
        return alibi_bias(slope, tile.seq.q_pos(0) + step.tile * Config::kQueries, tile.first_key);
    }
}

// A lane's part of the gradient of a head's slope: the sum of gradients of scores times the way from the
// query to the key.
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
        float sums[2] = {};     // a sum for each key
        float by_query = 0.0f;  // the sum of both, times the query's place in its tile
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const float gradient = weights[i] * products[i];
            sums[i / 2 % 2] += gradient;
            by_query = fmaf(gradient, static_cast<float>(i / 4 * 8 + i % 2), by_query);
        }
        const int32_t key = tile.first_key + row;
        const int32_t query = tile.seq.q_pos(0) + step.tile * Config::kQueries + 2 * (threadIdx.x % 4);
        sum_ += static_cast<float>(key - query) * (sums[0] + sums[1]) + 8.0f * sums[1] - by_query;
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
