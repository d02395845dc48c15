// One instance of the prefill kernel, launched.
#pragma once

#include "cuda/prefill/kernel.cuh"
#include "cuda/runtime.h"

namespace octavo::cuda {

template <class T, int kHeadDim, int kWarpgroups>
void launch_prefill(const ForwardParams& params, const PrefillPlan& plan, int32_t num_ctas,
                    cudaStream_t stream) {
    using Config = PrefillConfig<kHeadDim, kWarpgroups>;
    constexpr size_t kSharedBytes = sizeof(PrefillShared<Config>);
    static_assert(kSharedBytes <= 227 * 1024);
    const auto kernel = prefill_kernel<T, kHeadDim, kWarpgroups>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
          "cudaFuncSetAttribute");
    kernel<<<num_ctas, Config::kThreads, kSharedBytes, stream>>>(params, plan);
    check(cudaGetLastError(), params.op);
}

}  // namespace octavo::cuda
