// Combines the results of splits by their log-sum-exp (Flash-Decoding). Page:
// docs/kernels/latent_attention.md.
//
// grid: one CTA per row of [total_q, num_q_heads]. A CTA owns one row; it has four groups of threads, each
// with every fourth split.
#pragma once

#include "common/online_softmax.h"
#include "cuda/latent/parameters.h"
#include "cuda/latent/plan.h"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/types.h"
#include "cuda/warp.cuh"

#include <cstdint>

namespace octavo::cuda {

constexpr int kCombineLatentGroups = 4, kCombineLatentThreads = kCombineLatentGroups * kLatentVDim / 4;
constexpr int kMaxLatentSplits = 1024;  // the check refuses more

template <class T>
__global__ void __launch_bounds__(kCombineLatentThreads)
    combine_latent_kernel(const __grid_constant__ LatentAttentionParams p,
                          const __grid_constant__ LatentLaunch launch) {
    __shared__ float weights[kMaxLatentSplits];
    __shared__ float4 sums[kCombineLatentGroups][kLatentVDim / 4];
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const int64_t row = blockIdx.x, total_rows = p.total_q * p.num_q_heads;
    const auto token = static_cast<int64_t>(launch.num_q_heads.quotient(static_cast<int32_t>(row)));
    const int64_t head = row - token * p.num_q_heads;
    if (p.cu_seqlens_q && token >= p.cu_seqlens_q[p.batch]) return;

    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        float max = -INFINITY;
        for (int split = lane; split < launch.num_partials; split += 32) {
            weights[split] = launch.partial_lse[split * total_rows + row] * kLog2e;
            max = fmaxf(max, weights[split]);
        }
        max = warp_max(max);
        float sum = 0.0f;
        for (int split = lane; split < launch.num_partials; split += 32) {
            weights[split] = max == -INFINITY ? 0.0f : exp2f(weights[split] - max);
            sum += weights[split];
        }
        const SoftmaxState state{max, warp_sum(sum)};
        const float scale = state.inverse_sum() * p.out_scale;
        for (int split = lane; split < launch.num_partials; split += 32) weights[split] *= scale;
        if (lane == 0 && p.lse) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = state.lse();
    }
    __syncthreads();

    const int group = threadIdx.x / (kLatentVDim / 4), piece = threadIdx.x % (kLatentVDim / 4);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int split = group; split < launch.num_partials; split += kCombineLatentGroups) {
        const float weight = weights[split];
        const float4 part = reinterpret_cast<const float4*>(launch.partial_out +
                                                            (split * total_rows + row) * kLatentVDim)[piece];
        sum.x += weight * part.x;
        sum.y += weight * part.y;
        sum.z += weight * part.z;
        sum.w += weight * part.w;
    }
    sums[group][piece] = sum;
    __syncthreads();
    const int column = threadIdx.x;  // there are as many threads as columns
    static_assert(kCombineLatentThreads == kLatentVDim);
    float total = 0.0f;
#pragma unroll
    for (int g = 0; g < kCombineLatentGroups; ++g) total += reinterpret_cast<const float*>(sums[g])[column];
    static_cast<T*>(p.out)[token * p.out_token_stride + head * p.out_head_stride + column] =
        from_float<T>(total);
}

}  // namespace octavo::cuda
