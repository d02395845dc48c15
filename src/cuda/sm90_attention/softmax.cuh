// A consumer's softmax over one tile of scores after another: biases, masks, the running maximum and sum.
#pragma once

#include "common/score.h"
#include "cuda/ptx/exp2.h"
#include "cuda/sm90_attention/rows.cuh"
#include "cuda/tile/softmax.cuh"

namespace octavo::cuda {

// Maximum and sum of the two rows of a thread, the sum over this thread's columns only. The maximum is raised
// only when a score passes it by kSlackLog2.
struct Sm90Softmax {
    float scale;                            // turns scores into units of log2(e)
    float slack;                            // kSlackLog2, in units of scores
    float max[2] = {-INFINITY, -INFINITY};  // in units of scores
    float sum[2] = {0.0f, 0.0f};

    __device__ explicit Sm90Softmax(float scale) : scale(scale), slack(kSlackLog2 / scale) {}

    __device__ float max_log2(int half) const { return max[half] == -INFINITY ? 0.0f : max[half] * scale; }

    // Turns scores into weights. Returns whether the sums so far must be multiplied by `factor`. With
    // kShifted, `shift` has not been added to the scores of this thread.
    template <bool kShifted, int kCount>
    __device__ __forceinline__ bool apply(float (&scores)[kCount], const float (&shift)[2],
                                          float (&factor)[2]) {
        const bool raise = __any_sync(~0u, may_raise<kShifted>(scores, shift));
        if (raise) {
            float highest[2];
            thread_max<kShifted>(scores, shift, highest);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Each row decides by itself, so that its bits do not depend on other rows, such as those
                // that hold no query.
                const float of_row = row_max(highest[half]);
                const bool rises = of_row > max[half] + slack;
                factor[half] = rises ? ptx::exp2_approx((max[half] - of_row) * scale) : 1.0f;
                if (rises) max[half] = of_row;
                sum[half] *= factor[half];
            }
        }
        float subtract[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float of_thread = kShifted ? max[half] - shift[half] : max[half];
            subtract[half] = max[half] == -INFINITY ? 0.0f : of_thread * scale;
        }
        float tile_sum[2][2] = {};
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            scores[i] = ptx::exp2_approx(fmaf(scores[i], scale, -subtract[i / 2 % 2]));
            tile_sum[i / 2 % 2][i % 2] += scores[i];
        }
        sum[0] += tile_sum[0][0] + tile_sum[0][1];
        sum[1] += tile_sum[1][0] + tile_sum[1][1];
        return raise;
    }

  private:
    // The highest of this thread's scores in each row.
    template <bool kShifted, int kCount>
    __device__ static __forceinline__ void thread_max(const float (&scores)[kCount], const float (&shift)[2],
                                                      float (&highest)[2]) {
        float of_columns[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            float& m = of_columns[i / 2 % 2][i % 2];
            m = fmaxf(m, scores[i]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            highest[half] = fmaxf(of_columns[half][0], of_columns[half][1]);
            if (kShifted) highest[half] += shift[half];
        }
    }

    // Whether one of this thread's scores passes its row's maximum by more than `slack`; mostly none does. It
    // may say so, too, where that limit lies below zero.
    template <bool kShifted, int kCount>
    __device__ __forceinline__ bool may_raise(const float (&scores)[kCount], const float (&shift)[2]) const {
        if constexpr (kShifted) {
            float highest[2];
            thread_max<true>(scores, shift, highest);
            return highest[0] > max[0] + slack || highest[1] > max[1] + slack;
        } else {
            // Numbers from zero on have the order of their bits as integers, of which one instruction finds
            // the largest of three: a quarter of the time that maxima of numbers take.
            int32_t highest[2] = {0, 0};
            static_assert(kCount % 4 == 0);
#pragma unroll
            for (int i = 0; i < kCount; i += 2) {
                int32_t& m = highest[i / 2 % 2];
                m = __vimax3_s32(m, __float_as_int(scores[i]), __float_as_int(scores[i + 1]));
            }
            return highest[0] > __float_as_int(max[0] + slack) || highest[1] > __float_as_int(max[1] + slack);
        }
    }
};

// Applies softcap, ALiBi (counted from this thread's first column, unless it is symmetric) and masks to a
// tile of scores. Each is a branch that the whole warpgroup takes or skips.
template <int kKeys, int kCount, class Config>
__device__ __forceinline__ void score_tile(float (&scores)[kCount], const ScoreTransform& transform,
                                           bool add_alibi, const Sm90Rows<Config>& rows, int32_t first_key) {
    const int32_t first_column = first_key + 2 * (threadIdx.x % 4);
    if (Config::kMayCap && transform.has_softcap) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) scores[i] = transform(scores[i]);
    }
    if (add_alibi) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int column = i / 4 * 8 + i % 2;
            scores[i] = fmaf(rows.slope[i / 2 % 2], column, scores[i]);
        }
    }
    if constexpr (Config::kSymmetricAlibi) {
        const float own[2] = {static_cast<float>(rows.q_pos[0] - first_column),
                              static_cast<float>(rows.q_pos[1] - first_column)};
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const auto column = static_cast<float>(i / 4 * 8 + i % 2);
            scores[i] = fmaf(-rows.slope[i / 2 % 2], fabsf(column - own[i / 2 % 2]), scores[i]);
        }
    }
    if (rows.see_all(first_key, kKeys)) return;
    const int32_t end[2] = {rows.row_end[0] - first_column, rows.row_end[1] - first_column};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int column = i / 4 * 8 + i % 2;
        if (column >= end[i / 2 % 2]) scores[i] = -INFINITY;
    }
    if (!rows.has_window_left) return;
    const int32_t behind_prefix = first_column - rows.prefix_len;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int column = i / 4 * 8 + i % 2;
        if (static_cast<uint32_t>(behind_prefix + column) < rows.row_gap[i / 2 % 2]) scores[i] = -INFINITY;
    }
}

// Calls Sm90Softmax::apply on scores in which ALiBi counts from the tile's first column, or (`by_thread`)
// from each thread's first column.
template <class Config, int kCount>
__device__ __forceinline__ bool apply_softmax(Sm90Softmax& softmax, float (&scores)[kCount],
                                              const Sm90Rows<Config>& rows, int32_t first_key, bool by_thread,
                                              float (&factor)[2]) {
    if constexpr (!Config::kAlibi) return softmax.apply<false>(scores, {}, factor);
    const int32_t first_column = by_thread ? 2 * (threadIdx.x % 4) : 0;
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
        shift[half] = alibi_bias(rows.slope[half], rows.anchor, first_key + first_column);
    return softmax.apply<true>(scores, shift, factor);
}

}  // namespace octavo::cuda
