// One instance of the forward kernel, launched.
#pragma once

#include "cuda/forward/combine.cuh"
#include "cuda/forward/kernel.cuh"
#include "cuda/runtime.h"

namespace octavo::cuda {

template <class T, int kHeadDim, int kStages>
void launch_forward(const ForwardParams& params, const ForwardPlan& plan, cudaStream_t stream) {
    using Config = ForwardConfig<kHeadDim, kStages>;
    constexpr size_t kSharedBytes = sizeof(ForwardShared<T, Config>);
    static_assert(kSharedBytes <= forward_shared_bytes(kStages));
    const auto kernel =
        params.dropout.any() ? forward_kernel<T, Config, true> : forward_kernel<T, Config, false>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
          "cudaFuncSetAttribute");
    const dim3 grid(plan.num_row_tiles, params.num_kv_heads, plan.num_splits);
    kernel<<<grid, Config::kThreads, kSharedBytes, stream>>>(params, plan);
    check(cudaGetLastError(), params.op);
    if (plan.num_splits == 1) return;
    const int64_t threads = params.total_q * params.num_q_heads * 32;
    const auto blocks = static_cast<unsigned>((threads + kCombineThreads - 1) / kCombineThreads);
    combine_kernel<T><<<blocks, kCombineThreads, 0, stream>>>(params, plan);
    check(cudaGetLastError(), params.op);
}

}  // namespace octavo::cuda
