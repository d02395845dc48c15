// Runs before the gradients. It writes the statistics of all queries as terms that products add, and zeros
// where dQ is summed.
//
// grid: x rows of workspace, kPreparedRows a warp; y query heads, the last first.
#pragma once

#include "common/online_softmax.h"
#include "common/score.h"
#include "cuda/attention_backward/sink_terms.h"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/rows.cuh"
#include "cuda/sm90_backward/parameters.h"
#include "cuda/sm90_backward/tiles.h"
#include "cuda/types.h"

#include <cmath>

namespace octavo::cuda {

// BfloatTerms says what `factor` is for.
__device__ __forceinline__ BfloatTerms split_in_terms(float x, float factor = 0.0f) {
    BfloatTerms row{};
#pragma unroll
    for (int i = 0; i < 6; ++i) {
        if (i == 3) x = factor;
        const bfloat16 term = from_float<bfloat16>(x);
        row.terms[i] = static_cast<__nv_bfloat16_raw>(term).x;
        x -= to_float(term);
    }
    return row;
}

__device__ __forceinline__ float sum_of_terms(const BfloatTerms& row) {
    auto term = [&](int i) { return __uint_as_float(uint32_t{row.terms[i]} << 16); };
    return term(0) + (term(1) + term(2));
}

// The lanes of one row of workspace, eight elements each, and the rows that a warp works on at once.
template <class Config>
constexpr int kPreparedLanes = Config::kHeadDim > 128  ? 32
                               : Config::kHeadDim > 64 ? 16
                                                       : 8;
template <class Config>
constexpr int kPreparedRows = 32 / kPreparedLanes<Config>;

constexpr float kNoWeight = -1e30f;

template <class T, class Config>
__global__ void prepare_backward_kernel(const __grid_constant__ AttentionBackwardParams p,
                                        const __grid_constant__ Sm90BackwardLaunch plan) {
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    constexpr int kLanes = kPreparedLanes<Config>;
    const int lane = threadIdx.x % kLanes, dim = 8 * lane;
    static_assert(Config::kQueries % (kRowsPerBlock * kPreparedRows<Config>) ==
                  0);  // so that every row exists
    const auto row = static_cast<int32_t>(warp_row() * kPreparedRows<Config> + threadIdx.x % 32 / kLanes);
    // The first heads come last, since their sums are needed first and should still lie in the L2 cache.
    const int64_t head = p.num_q_heads - 1 - static_cast<int32_t>(blockIdx.y);
    const int64_t place = head * plan.num_rows + row;
    if (lane == 0 && place < plan.num_counters) plan.tiles_taken[place] = 0;  // there are more rows
    if constexpr (!Config::kDqApart) {
        auto* const dq = reinterpret_cast<float4*>(plan.dq_sums + place * Config::kHeadDim);
        constexpr bool kAllLanes = Config::kHeadDim == 8 * kLanes;
        const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (kAllLanes || kLanes + lane < Config::kHeadDim / 4) dq[kLanes + lane] = zeros;
        dq[lane] = zeros;
    }
    if constexpr (Config::kOrdered) {
        if (row % Config::kQueries == 0 && lane < Config::kConsumers)
            plan.turns[(head * plan.num_tiles + row / Config::kQueries) * Config::kConsumers + lane] = 0;
    }
    const WorkspaceRow at = find_workspace_row<Config::kQueries>(p, plan, row);
    float lse = -INFINITY, delta = 0.0f;  // for a row without a query
    bool sees_nothing = true;
    if (at.batch >= 0) {
        auto offset = [&](int64_t batch_stride, int64_t token_stride, int64_t head_stride) {
            const int64_t begin =
                p.cu_seqlens_q ? p.cu_seqlens_q[at.batch] * token_stride : at.batch * batch_stride;
            return begin + at.query * token_stride + head * head_stride;
        };
        const T* const out =
            static_cast<const T*>(p.out) + offset(p.out_batch_stride, p.out_token_stride, p.out_head_stride);
        const T* const dout = static_cast<const T*>(p.dout) +
                              offset(p.dout_strides.batch, p.dout_strides.token, p.dout_strides.head);
        if (dim < p.head_dim_v) {
            const uint4 a = *reinterpret_cast<const uint4*>(out + dim);
            const uint4 b = *reinterpret_cast<const uint4*>(dout + dim);
            auto add = [&](uint32_t x, uint32_t y) {
                const float2 of_out = unpack<T>(x), of_dout = unpack<T>(y);
                delta += of_out.x * of_dout.x + of_out.y * of_dout.y;
            };
            add(a.x, b.x);
            add(a.y, b.y);
            add(a.z, b.z);
            add(a.w, b.w);
        }
        lse = p.lse[offset(p.lse_batch_stride, p.lse_token_stride, p.lse_head_stride)];
        sees_nothing = lse == -INFINITY || has_sink_alone(p, at.batch, static_cast<int32_t>(head), at.query);
        if (p.sinks && sees_nothing) delta = 0.0f;  // its out is 0, whatever the product with dout was
        if (p.dlse && lane == 0)
            delta -= p.dlse[offset(p.dlse_strides.batch, p.dlse_strides.token, p.dlse_strides.head)];
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
    if (lane != 0) return;
    [[maybe_unused]] const int64_t number_place =
        place - row % Config::kQueries + statistic_place<Config::kQueries>(row % Config::kQueries);
    // A query that sees nothing has no weight, whatever its scores.
    auto* const lse_to = static_cast<typename Config::Lse*>(plan.lse);
    if constexpr (Config::kSoftcap) {
        lse_to[number_place] = sees_nothing ? INFINITY : lse * kLog2e;
    } else if constexpr (Config::kAlibi) {
        // The distance from the tile's first query; the factor is that of the keys' distances from the CTA's
        // first. What is between both is a number for each step.
        const float slope =
            at.batch >= 0 ? p.alibi_slopes[at.batch * p.alibi_batch_stride + head] / p.softmax_scale : 0.0f;
        const float bias = -slope * static_cast<float>(row % Config::kQueries), own = -lse / p.softmax_scale;
        lse_to[place] = sees_nothing ? split_in_terms(kNoWeight) : split_in_terms(bias + own, slope);
        if constexpr (Config::kSymmetric) {
            lse_to[num_terms(p, plan) + place] =
                sees_nothing ? split_in_terms(kNoWeight) : split_in_terms(own - bias, -slope);
        }
    } else {
        lse_to[place] = split_in_terms(sees_nothing ? kNoWeight : -lse / p.softmax_scale);
    }
    if (plan.sinks.terms)
        plan.sinks.terms[place] = at.batch >= 0 ? sink_gradient(p.sinks[head], lse, delta) : 0.0f;
    auto* const delta_to = static_cast<typename Config::Delta*>(plan.delta);
    if constexpr (Config::kDropout) {
        // Gradients are scaled at the end. A query that sees nothing leaves 0, whatever its dlse is: dS has a
        // product of weights, here zeros, and delta, which the mask does not reach.
        delta_to[number_place] = sees_nothing ? 0.0f : delta / p.out_scale;
    } else {
        delta_to[place] = split_in_terms(-delta);
    }
}

}  // namespace octavo::cuda
