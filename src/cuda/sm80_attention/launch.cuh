// One instance of the forward kernel, launched.
#pragma once

#include "cuda/runtime.h"
#include "cuda/sm80_attention/combine_splits.cuh"
#include "cuda/sm80_attention/kernel.cuh"

namespace octavo::cuda {

template <class T, int kHeadDim, int kStages>
void launch_sm80_attention(const AttentionParams& params, const Sm80Launch& plan, cudaStream_t stream) {
    using Config = Sm80Config<kHeadDim, kStages>;
    constexpr size_t kSharedBytes = sizeof(Sm80Shared<T, Config>);
    static_assert(kSharedBytes <= sm80_shared_bytes(kStages));
    const auto kernel = params.dropout.any() ? sm80_attention_kernel<T, Config, true>
                                             : sm80_attention_kernel<T, Config, false>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
          "cudaFuncSetAttribute");
    const dim3 grid(plan.num_row_tiles, params.num_kv_heads, plan.num_splits);
    kernel<<<grid, Config::kThreads, kSharedBytes, stream>>>(params, plan);
    check(cudaGetLastError(), params.op);
    if (plan.num_splits == 1) return;
    const int64_t threads = params.total_q * params.num_q_heads * 32;
    const auto blocks = static_cast<unsigned>((threads + kCombineThreads - 1) / kCombineThreads);
    combine_splits_kernel<T><<<blocks, kCombineThreads, 0, stream>>>(params, plan);
    check(cudaGetLastError(), params.op);
}

}  // namespace octavo::cuda
