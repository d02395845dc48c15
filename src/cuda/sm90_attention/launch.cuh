// One instance of the prefill kernel, launched.
#pragma once

#include "cuda/runtime.h"
#include "cuda/sm90_attention/kernel.cuh"

namespace octavo::cuda {

template <class T, class Config>
void launch_sm90_kernel(const AttentionParams& params, const Sm90Launch& plan, int32_t num_ctas,
                        cudaStream_t stream) {
    constexpr size_t kSharedBytes = sizeof(Sm90Shared<Config>);
    static_assert(kSharedBytes <= 227 * 1024);
    const auto kernel = sm90_attention_kernel<T, Config>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
          "cudaFuncSetAttribute");
    cudaLaunchAttribute attributes[2] = {dependent_launch()};
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {Config::kCtas, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(num_ctas);
    config.blockDim = dim3(Config::kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = Config::kCtas > 1 ? 2 : 1;
    check(cudaLaunchKernelEx(&config, kernel, params, plan), params.op);
}

template <class T, int kHeadDim, int kWarpgroups, int kCtas>
void launch_sm90_attention(const AttentionParams& params, const Sm90Launch& plan, int32_t num_ctas,
                           cudaStream_t stream) {
    auto launch = launch_sm90_kernel<T, Sm90Config<kHeadDim, kWarpgroups, kCtas, Sm90Feature::none>>;
    if constexpr (has_few_rows(kWarpgroups, kCtas)) {
        if (plan.few_rows)
            launch = launch_sm90_kernel<T, Sm90Config<kHeadDim, kWarpgroups, kCtas, Sm90Feature::few_rows>>;
    }
    if constexpr (has_splits(kCtas)) {
        if (plan.num_splits > 0)
            launch = launch_sm90_kernel<T, Sm90Config<kHeadDim, kWarpgroups, kCtas, Sm90Feature::splits>>;
    }
    if (params.alibi_slopes)
        launch = launch_sm90_kernel<T, Sm90Config<kHeadDim, kWarpgroups, kCtas, Sm90Feature::alibi>>;
    if (params.dropout.any())
        launch = launch_sm90_kernel<T, Sm90Config<kHeadDim, kWarpgroups, kCtas, Sm90Feature::dropout>>;
    launch(params, plan, num_ctas, stream);
}

}  // namespace octavo::cuda
