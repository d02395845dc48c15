// Before the gradients: the statistics of all queries as terms that products add, and zeros where
// dQ is summed.
// grid: kPreparedRows (query head, row of workspace) a warp.
#pragma once

#include "cuda/ptx/grid_dependency.h"
#include "cuda/rows.cuh"
#include "cuda/sm90_backward/parameters.h"
#include "cuda/types.h"

#include <cmath>

namespace octavo::cuda {

__device__ __forceinline__ BfloatTerms split_in_terms(float x) {
    BfloatTerms row{};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const bfloat16 term = from_float<bfloat16>(x);
        row.terms[i] = static_cast<__nv_bfloat16_raw>(term).x;
        x -= to_float(term);
    }
    return row;
}

// The query that a row of workspace belongs to; batch -1: none.
struct WorkspaceRow {
    int32_t batch, query;
};
template <int kQueries>
__device__ __forceinline__ WorkspaceRow find_workspace_row(const AttentionBackwardParams& p,
                                                           const Sm90BackwardLaunch& plan, int32_t row) {
    if (!p.cu_seqlens_q) {
        const int32_t batch = row / plan.sequence_rows, query = row - batch * plan.sequence_rows;
        return {query < p.seqlen_q ? batch : -1, query};
    }
    int32_t low = 0, high = p.batch;  // the last sequence that begins at or before the row
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        (first_workspace_row<kQueries>(plan, p.cu_seqlens_q, middle) <= row ? low : high) = middle;
    }
    const int32_t query = row - first_workspace_row<kQueries>(plan, p.cu_seqlens_q, low);
    return {query < p.cu_seqlens_q[low + 1] - p.cu_seqlens_q[low] ? low : -1, query};
}

// Rows of workspace that a warp works on at once: kHeadDim / 8 lanes each.
template <class Config>
constexpr int kPreparedRows = 32 / (Config::kHeadDim / 8);

template <class T, class Config>
__global__ void prepare_backward_kernel(const __grid_constant__ AttentionBackwardParams p,
                                        const __grid_constant__ Sm90BackwardLaunch plan) {
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    constexpr int kLanes = Config::kHeadDim / 8;
    const int lane = threadIdx.x % kLanes, dim = 8 * lane;
    const int64_t i = warp_row() * kPreparedRows<Config> + threadIdx.x % 32 / kLanes;
    // The first heads last: theirs are the sums that are needed first, from the L2 cache.
    const int64_t of_last = i / plan.num_rows, row = i - of_last * plan.num_rows;
    const int64_t head = p.num_q_heads - 1 - of_last;
    const bool exists = head >= 0;
    WorkspaceRow at{-1, 0};
    if (exists) {
        auto* const dq = reinterpret_cast<float4*>(plan.dq + (head * plan.num_rows + row) * Config::kHeadDim);
        dq[lane] = dq[kLanes + lane] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        at = find_workspace_row<Config::kQueries>(p, plan, static_cast<int32_t>(row));
    }
    constexpr float kNoWeight = -1e30f;  // whatever the scores
    float minus_lse = kNoWeight, delta = 0.0f;
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
        if (dim < p.head_dim) {
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
        const float lse = p.lse[offset(p.lse_batch_stride, p.lse_token_stride, p.lse_head_stride)];
        if (lse != -INFINITY) minus_lse = -lse / p.softmax_scale;
        if (p.dlse && lane == 0)
            delta -= p.dlse[offset(p.dlse_strides.batch, p.dlse_strides.token, p.dlse_strides.head)];
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
    if (exists && lane == 0) {
        plan.lse[head * plan.num_rows + row] = split_in_terms(minus_lse);
        plan.delta[head * plan.num_rows + row] = split_in_terms(-delta);
    }
}

}  // namespace octavo::cuda
