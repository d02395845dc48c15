// One instance of the decode kernel, launched.
#pragma once

#include "cuda/decode/kernel.cuh"
#include "cuda/decode/workspace.h"
#include "cuda/runtime.h"

#include <algorithm>

namespace octavo::cuda {

template <class T, int kHeadDim, int kRowTiles>
void launch_decode(const ForwardParams& params, cudaStream_t stream) {
    using Config = DecodeConfig<kHeadDim, kRowTiles>;
    constexpr size_t kSharedBytes = sizeof(DecodeShared<Config>);
    static_assert(kSharedBytes <= 227 * 1024);
    const auto kernel = decode_kernel<T, kHeadDim, kRowTiles>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
          "cudaFuncSetAttribute");
    const int32_t num_ctas = std::min(num_sms(params.device.index), kMaxDecodeCtas);
    const size_t rows = size_t{2} * num_ctas * Config::kRows;
    const DecodeWorkspace workspace =
        decode_workspace(params.device.index, stream, rows * (kHeadDim + 2) * sizeof(float),
                         size_t{1} * num_ctas * Config::kRows);
    DecodePlan plan;
    plan.group_size = FastDivide::by(params.group_size());
    plan.page_size = FastDivide::by(params.page_size);
    plan.partial_out = static_cast<float*>(workspace.partial);
    plan.partial_max = plan.partial_out + rows * kHeadDim;
    plan.partial_sum = plan.partial_max + rows;
    plan.counters = workspace.counters;
    // From sm_90 on the launch overlaps the end of the kernel before it; the kernel waits for that one's
    // results.
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(num_ctas);
    config.blockDim = dim3(Config::kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = compute_capability(params.device.index) >= 90 ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, params, plan), params.op);
}

}  // namespace octavo::cuda
