// One instance of the decode kernel, launched.
#pragma once

#include "cuda/decode/batch_invariant.cuh"
#include "cuda/decode/kernel.cuh"
#include "cuda/runtime.h"
#include "cuda/workspace.h"

#include <algorithm>

namespace octavo::cuda {

// What a kernel can do on a device, asked once.
struct DecodeLimits {
    int32_t num_ctas;
    bool has_dependent_launch, pairs;

    template <class Config, class Kernel>
    static DecodeLimits ask(Kernel kernel, int32_t device) {
        constexpr size_t kSharedBytes = sizeof(DecodeShared<Config>);
        static_assert(kSharedBytes <= 227 * 1024);
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
              "cudaFuncSetAttribute");
        // The code may come from the PTX of an older architecture, without the instructions for what follows.
        cudaFuncAttributes attributes{};
        check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
        DecodeLimits limits{std::min(num_sms(device), kMaxDecodeCtas), attributes.ptxVersion >= 90, false};
        if (!limits.has_dependent_launch) return limits;
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {2, 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(2);
        config.blockDim = dim3(Config::kThreads);
        config.dynamicSmemBytes = kSharedBytes;
        config.attrs = &attribute;
        config.numAttrs = 1;
        int max_clusters = 0;
        check(cudaOccupancyMaxActiveClusters(&max_clusters, kernel, &config),
              "cudaOccupancyMaxActiveClusters");
        limits.pairs = 2 * max_clusters == limits.num_ctas;  // and no SM is left out
        return limits;
    }
};

template <class Config, class Kernel, class Plan>
void launch_decode_kernel(Kernel kernel, const DecodeLimits& limits, bool pairs, const ForwardParams& params,
                          const Plan& plan, cudaStream_t stream) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(limits.num_ctas);
    config.blockDim = dim3(Config::kThreads);
    config.dynamicSmemBytes = sizeof(DecodeShared<Config>);
    config.stream = stream;
    config.attrs = attributes;
    if (limits.has_dependent_launch) {
        // The launch overlaps the end of the kernel before it; the kernel waits for that one's results.
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (pairs) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {2, 1, 1};
    }
    check(cudaLaunchKernelEx(&config, kernel, params, plan), params.op);
}

template <class T, int kHeadDim, int kRowTiles>
void launch_decode(const ForwardParams& params, cudaStream_t stream) {
    using Config = DecodeConfig<kHeadDim, kRowTiles>;
    const auto kernel = decode_kernel<T, kHeadDim, kRowTiles>;
    static PerDevice<DecodeLimits> limits_of;
    const DecodeLimits& limits = limits_of.get(
        params.device.index, [&](int32_t device) { return DecodeLimits::ask<Config>(kernel, device); });

    DecodePlan plan;
    plan.group_size = FastDivide::by(params.group_size());
    plan.page_size = FastDivide::by(params.page_size);
    plan.pairs = limits.pairs;
    const size_t rows = size_t{1} * limits.num_ctas * Config::kRows;
    const KeptWorkspace workspace =
        kept_workspace(params.device.index, stream, 2 * rows * Config::kPartialRow * sizeof(float), rows);
    plan.partial = static_cast<float*>(workspace.partial);
    plan.counters = workspace.counters;
    launch_decode_kernel<Config>(kernel, limits, limits.pairs, params, plan, stream);
}

template <class T, int kHeadDim, int kRowTiles>
void launch_batch_invariant_decode(const ForwardParams& params, cudaStream_t stream) {
    using Config = DecodeConfig<kHeadDim, kRowTiles>;
    const auto kernel = batch_invariant_decode_kernel<T, kHeadDim, kRowTiles>;
    static PerDevice<DecodeLimits> limits_of;
    const DecodeLimits& limits = limits_of.get(
        params.device.index, [&](int32_t device) { return DecodeLimits::ask<Config>(kernel, device); });

    BatchInvariantPlan<Config> plan;
    plan.group_size = FastDivide::by(params.group_size());
    plan.page_size = FastDivide::by(params.page_size);
    plan.units = Units<Config>(params.num_kv_heads);
    const size_t rows = size_t{1} * limits.num_ctas * Config::kRows;
    const KeptWorkspace workspace =
        kept_workspace(params.device.index, stream,
                       rows * plan.units.max_units() * Config::kPartialRow * sizeof(float), rows);
    plan.partial = static_cast<float*>(workspace.partial);
    plan.counters = workspace.counters;
    launch_decode_kernel<Config>(kernel, limits, false, params, plan, stream);
}

}  // namespace octavo::cuda
