// Behind the statistics of queries: the gradients of sinks, from what each query adds.
#pragma once

#include "cuda/attention_backward/sink_terms.h"
#include "cuda/launch.cuh"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/warp.cuh"

#include <cstdint>

namespace octavo::cuda {

constexpr int kSinkThreads = 1024;

// Adds up the terms in one order. grid: one CTA a query head.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    sink_gradients_kernel(const __grid_constant__ AttentionBackwardParams p,
                          const __grid_constant__ SinkTerms sinks) {
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    __shared__ float sums[kThreads / 32];
    const float* const terms = sinks.terms + blockIdx.x * sinks.num_rows;
    float sum = 0.0f;
    for (int64_t row = threadIdx.x; row < sinks.num_rows; row += kThreads) sum += terms[row];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = warp_sum(threadIdx.x < kThreads / 32 ? sums[threadIdx.x] : 0.0f);
    if (threadIdx.x == 0) p.dsinks[blockIdx.x] = sum;
}

inline void launch_sink_gradients(const AttentionBackwardParams& p, const SinkTerms& sinks,
                                  cudaStream_t stream) {
    const LaunchShape shape{dim3(p.num_q_heads), kSinkThreads, true};
    launch<sink_gradients_kernel<kSinkThreads>>(p.op, p.device.index, stream, shape, p, sinks);
}

// Whether a query sees no key though it has a log-sum-exp, that of its sink.
__device__ __forceinline__ bool has_sink_alone(const AttentionBackwardParams& p, int32_t batch,
                                               int32_t query) {
    if (!p.sinks) return false;
    const SequenceSlice seq = SequenceSlice::make(p, batch);
    return !seq.see.sees_any(seq.q_pos(query));
}

}  // namespace octavo::cuda
