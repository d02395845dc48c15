// One instance of the forward kernel, launched.
#pragma once

#include "cuda/forward/combine.cuh"
#include "cuda/forward/kernel.cuh"
#include "cuda/runtime.h"

namespace octavo::cuda {

template <class T, int kHeadDim>
void launch_forward(const ForwardParams& params, const ForwardPlan& plan, cudaStream_t stream) {
    using Config = ForwardConfig<kHeadDim>;
    constexpr size_t kSharedBytes = sizeof(ForwardShared<T, Config>);
    check(cudaFuncSetAttribute(forward_kernel<T, kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kSharedBytes),
          "cudaFuncSetAttribute");
    const dim3 grid(plan.num_row_tiles, params.num_kv_heads, plan.num_splits);
    forward_kernel<T, kHeadDim><<<grid, Config::kThreads, kSharedBytes, stream>>>(params, plan);
    check(cudaGetLastError(), params.op);
    if (plan.num_splits == 1) return;
    const int64_t threads = params.total_q * params.num_q_heads * 32;
    const auto blocks = static_cast<unsigned>((threads + kCombineThreads - 1) / kCombineThreads);
    combine_kernel<T><<<blocks, kCombineThreads, 0, stream>>>(params, plan);
    check(cudaGetLastError(), params.op);
}

}  // namespace octavo::cuda
