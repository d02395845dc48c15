// Launches sm90_wide_attention for one type.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/sm90_wide_attention/kernel.cuh"
#include "cuda/sm90_wide_attention/plan.h"

namespace octavo::cuda {

template <class T>
void launch_sm90_wide_attention(const AttentionParams& params, const Sm90WidePlan& plan,
                                const Sm90Launch& arguments, cudaStream_t stream) {
    constexpr size_t kSharedBytes = sizeof(Sm90WideShared);
    static_assert(kSharedBytes <= 227 * 1024);
    const LaunchShape shape{dim3(plan.num_ctas), Sm90WideConfig::kThreads, true, Sm90WideConfig::kCtas};
    launch<sm90_wide_attention_kernel<T>, kSharedBytes>(params.op, params.device.index, stream, shape, params,
                                                        arguments);
}

}  // namespace octavo::cuda
