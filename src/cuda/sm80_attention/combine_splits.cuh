// Combines the partial results of the splits by their LSE (Flash-Decoding). Page:
// docs/kernels/sm80_attention.md.
//
// grid: one warp per row of [total_q, num_q_heads]; a warp owns one row and reads it from every split.
#pragma once

#include "common/online_softmax.h"
#include "cuda/sm80_attention/kernel.cuh"

namespace octavo::cuda {

constexpr int kCombineThreads = 128;

template <class T>
__global__ void __launch_bounds__(kCombineThreads)
    combine_splits_kernel(const __grid_constant__ AttentionParams p,
                          const __grid_constant__ Sm80Launch plan) {
    const int64_t num_rows = p.total_q * p.num_q_heads;
    const int64_t row = (int64_t{blockIdx.x} * kCombineThreads + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    const int64_t token = row / p.num_q_heads, head = row % p.num_q_heads;
    if (row >= num_rows || (p.cu_seqlens_q && token >= p.cu_seqlens_q[p.batch])) return;

    SoftmaxState state;
    for (int32_t split = 0; split < plan.num_splits; ++split) {
        const float lse_log2 = plan.partial_lse[split * num_rows + row] * kLog2e;
        if (lse_log2 == -INFINITY) continue;
        state.raise(lse_log2);
        state.sum += exp2f(lse_log2 - state.max);
    }
    // `token` counts over the batch, which is what the strides of packed queries need; dense queries have a
    // batch and a token stride.
    int64_t out_begin = token * p.out_token_stride, lse_begin = token * p.lse_token_stride;
    if (!p.cu_seqlens_q) {
        const int64_t batch = token / p.seqlen_q, i = token % p.seqlen_q;
        out_begin = batch * p.out_batch_stride + i * p.out_token_stride;
        lse_begin = batch * p.lse_batch_stride + i * p.lse_token_stride;
    }
    T* const out = static_cast<T*>(p.out) + out_begin + head * p.out_head_stride;
    const float max = state.safe_max();  // the largest weight of a split
    float factor = p.out_scale;
    if (p.sinks) factor *= state.add_sink(p.sinks[head] * kLog2e);
    const float scale = state.inverse_sum() * factor;
    for (int32_t column = lane; column < p.head_dim_v; column += 32) {
        float sum = 0.0f;
        for (int32_t split = 0; split < plan.num_splits; ++split) {
            const int64_t partial_row = split * num_rows + row;
            const float lse_log2 = plan.partial_lse[partial_row] * kLog2e;
            if (lse_log2 == -INFINITY) continue;
            sum += exp2f(lse_log2 - max) * plan.partial_out[partial_row * p.head_dim_v + column];
        }
        out[column] = from_float<T>(sum * scale);
    }
    if (p.lse && lane == 0) p.lse[lse_begin + head * p.lse_head_stride] = state.lse();
}

}  // namespace octavo::cuda
