// The online softmax on the rows of one warp, in the accumulator layout of ptx/mma.h.
#pragma once

#include "common/online_softmax.h"
#include "cuda/ptx/exp2.h"
#include "cuda/types.h"

namespace octavo::cuda {

// The maximum and the sum over the four lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The state of this lane's two rows in each row tile. The maximum is raised only when a score passes it by
// kSlackLog2.
template <int kRowTiles>
class RowSoftmax {
  public:
    // `scale`, which must be positive, turns scores into units of log2(e).
    __device__ explicit RowSoftmax(float scale) : scale_(scale) {
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                max_[t][half] = -INFINITY;
                sum_[t][half] = 0.0f;
            }
        }
    }

    // Raises the maxima for the scores of one tile. Where one rises, the row's sums so far, in `out` too, are
    // rescaled.
    template <int kTiles, int kOutTiles>
    __device__ __forceinline__ void raise(const float (&scores)[kRowTiles][kTiles][4],
                                          float (&out)[kRowTiles][kOutTiles][4]) {
        float highest[kRowTiles][2];  // of this lane
        bool rises = false;
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x = fmaxf(scores[t][0][2 * half], scores[t][0][2 * half + 1]);
#pragma unroll
                for (int i = 1; i < kTiles; ++i)
                    x = fmaxf(x, fmaxf(scores[t][i][2 * half], scores[t][i][2 * half + 1]));
                highest[t][half] = x;
                rises = rises || highest[t][half] * scale_ > max_[t][half] * scale_ + kSlackLog2;
            }
        }
        if (!__any_sync(~0u, rises)) return;
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
            float factor[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float highest_of_row = row_max(highest[t][half]);
                float& max = max_[t][half];  // each row decides alone: its bits do not depend on neighbours
                const bool rises = highest_of_row * scale_ > max * scale_ + kSlackLog2;
                factor[half] = rises ? ptx::exp2_approx((max - highest_of_row) * scale_) : 1.0f;
                max = rises ? highest_of_row : max;
                sum_[t][half] *= factor[half];
            }
#pragma unroll
            for (int i = 0; i < kOutTiles; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) out[t][i][j] *= factor[j / 2];
            }
        }
    }

    // Returns the weights, rounded to T, of this lane's two neighbouring columns of group i in a row of row
    // tile t.
    template <class T, int kTiles>
    __device__ __forceinline__ uint32_t weigh(const float (&scores)[kRowTiles][kTiles][4], int t, int i,
                                              int half) {
        const float* from = scores[t][i] + 2 * half;
        const float low = ptx::exp2_approx(fmaf(from[0], scale_, -max_log2(t, half)));
        const float high = ptx::exp2_approx(fmaf(from[1], scale_, -max_log2(t, half)));
        sum_[t][half] += low + high;
        return pack<T>(low, high);
    }

    // The state of a row after the last tile.
    __device__ SoftmaxState state(int t, int half) const {
        SoftmaxState state;
        state.max = max_log2(t, half);
        state.sum = row_sum(sum_[t][half]);
        return state;
    }

  private:
    // Finite while no key has been seen, so that exp2 never gets inf - inf.
    __device__ float max_log2(int t, int half) const {
        return max_[t][half] == -INFINITY ? 0.0f : max_[t][half] * scale_;
    }

    float scale_;
    float max_[kRowTiles][2];  // in units of scores
    float sum_[kRowTiles][2];  // over this lane's columns alone
};

}  // namespace octavo::cuda
