// Scores and the online softmax on one warp's 16 rows, in the accumulator layout of ptx/mma.h.
#pragma once

#include "common/online_softmax.h"
#include "common/score.h"
#include "cuda/ptx/exp2.h"
#include "ops/forward_params.h"

namespace octavo::cuda {

// The two rows of which this lane holds elements: lane / 4 and eight further.
struct LaneRows {
    int32_t q_pos[2];
    float slope_log2[2];
};

// Over the four lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Calls body(score, half, column) for each element that this lane holds.
template <int kTiles, class Body>
__device__ __forceinline__ void for_each_score(float (&scores)[kTiles][4], Body body) {
    const int first_column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) body(scores[i][j], j / 2, 8 * i + first_column + j % 2);
    }
}

// From dot products to scores in units of log2(e), -inf where the query does not see the key. Each step is a
// branch that the whole CTA takes or not.
template <int kTiles>
__device__ __forceinline__ void score_tile(float (&scores)[kTiles][4], const ScoreTransform& transform,
                                           const LaneRows& rows, bool has_alibi, const Visibility& see,
                                           bool masked, int32_t first_key) {
    if (transform.has_softcap) {
        for_each_score(scores, [&](float& score, int, int) { score = transform(score); });
    } else {
        for_each_score(scores, [&](float& score, int, int) { score *= transform.inner; });
    }
    if (has_alibi) {
        for_each_score(scores, [&](float& score, int half, int column) {
            score += alibi_bias(rows.slope_log2[half], rows.q_pos[half], first_key + column);
        });
    }
    if (masked) {
        for_each_score(scores, [&](float& score, int half, int column) {
            if (!see.visible(rows.q_pos[half], first_key + column)) score = -INFINITY;
        });
    }
}

// From scores to weights; raises the states' maxima and rescales what `out` has gathered. The states' sums
// are this lane's share, to be added over the row at the end.
template <int kTiles, int kOutTiles>
__device__ __forceinline__ void softmax_tile(float (&scores)[kTiles][4], SoftmaxState (&state)[2],
                                             float (&out)[kOutTiles][4]) {
    float maximum[2] = {-INFINITY, -INFINITY};
    for_each_score(scores, [&](float& score, int half, int) { maximum[half] = fmaxf(maximum[half], score); });
    float factor[2], subtract[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        factor[half] = state[half].raise(row_max(maximum[half]));
        subtract[half] = state[half].safe_max();
    }
    for_each_score(scores, [&](float& score, int half, int) {
        score = ptx::exp2_approx(score - subtract[half]);
        state[half].sum += score;
    });
#pragma unroll
    for (int i = 0; i < kOutTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[i][j] *= factor[j / 2];
    }
}

}  // namespace octavo::cuda
