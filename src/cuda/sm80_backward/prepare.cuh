// Runs before the gradients: computes the statistics of all queries, in rows of each head. Page:
// docs/kernels/attention_backward.md.
//
// grid: kStatisticsLanes lanes per (token, head).
#pragma once

#include "common/online_softmax.h"
#include "common/score.h"
#include "cuda/attention_backward/sink_terms.h"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/sm80_backward/parameters.h"
#include "cuda/types.h"
#include "cuda/warp.cuh"

#include <cmath>

namespace octavo::cuda {

// Returns the sequence of query `row` of packed sequences; for a query of padding, it returns the batch.
__device__ __forceinline__ int32_t sequence_of(const AttentionBackwardParams& p, int64_t row) {
    int32_t low = 0, high = p.batch;  // searches the first sequence that ends behind the query
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (p.cu_seqlens_q[middle + 1] <= row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// The lanes that have a row, and the rows of a CTA.
constexpr int kStatisticsLanes = 8, kStatisticsRows = 32;

template <class T>
__global__ void __launch_bounds__(kStatisticsLanes* kStatisticsRows)
    query_statistics_kernel(const __grid_constant__ AttentionBackwardParams p,
                            const __grid_constant__ Sm80BackwardLaunch plan) {
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const int lane = threadIdx.x % kStatisticsLanes;
    const int64_t i = int64_t{blockIdx.x} * kStatisticsRows + threadIdx.x / kStatisticsLanes;
    const int64_t row = i / p.num_q_heads, head = i % p.num_q_heads;
    const bool is_row = row < p.total_q;
    const int64_t batch = p.cu_seqlens_q ? 0 : row / p.seqlen_q, token = row - batch * p.seqlen_q;
    auto offset = [&](int64_t batch_stride, int64_t token_stride, int64_t head_stride) {
        return p.cu_seqlens_q ? row * token_stride + head * head_stride
                              : batch * batch_stride + token * token_stride + head * head_stride;
    };
    const T* const out =
        static_cast<const T*>(p.out) + offset(p.out_batch_stride, p.out_token_stride, p.out_head_stride);
    const T* const dout = static_cast<const T*>(p.dout) +
                          offset(p.dout_strides.batch, p.dout_strides.token, p.dout_strides.head);
    const bool in_pieces = plan.out_aligned && plan.dout_aligned;  // of 16 bytes
    float delta = 0.0f;
    for (int32_t d = 8 * lane; is_row && d < p.head_dim_v; d += 8 * kStatisticsLanes) {
        if (in_pieces) {
            const uint4 a = *reinterpret_cast<const uint4*>(out + d),
                        b = *reinterpret_cast<const uint4*>(dout + d);
            const uint32_t a_pairs[] = {a.x, a.y, a.z, a.w}, b_pairs[] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 of_out = unpack<T>(a_pairs[j]), of_dout = unpack<T>(b_pairs[j]);
                delta += of_out.x * of_dout.x + of_out.y * of_dout.y;
            }
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) delta += to_float(out[d + j]) * to_float(dout[d + j]);
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < kStatisticsLanes; lanes *= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
    if (lane != 0 || !is_row) return;
    const float lse = p.lse[offset(p.lse_batch_stride, p.lse_token_stride, p.lse_head_stride)];
    bool sees_nothing = lse == -INFINITY, exists = true;
    if (p.sinks) {
        const int32_t sequence = p.cu_seqlens_q ? sequence_of(p, row) : static_cast<int32_t>(batch);
        exists = sequence < p.batch;
        const int64_t query = exists && p.cu_seqlens_q ? row - p.cu_seqlens_q[sequence] : token;
        sees_nothing = sees_nothing || !exists ||
                       has_sink_alone(p, sequence, static_cast<int32_t>(head), static_cast<int32_t>(query));
        if (sees_nothing) delta = 0.0f;  // its out is 0, whatever the product with dout was
    }
    if (p.dlse) delta -= p.dlse[offset(p.dlse_strides.batch, p.dlse_strides.token, p.dlse_strides.head)];
    plan.statistics[head * p.total_q + row] = {sees_nothing ? INFINITY : lse * kLog2e, delta};
    if (plan.sinks.terms)
        plan.sinks.terms[head * p.total_q + row] = exists ? sink_gradient(p.sinks[head], lse, delta) : 0.0f;
}

}  // namespace octavo::cuda
