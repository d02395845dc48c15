// One instance of the decode kernel, launched.
#pragma once

#include "cuda/decode/kernel.cuh"
#include "cuda/decode/workspace.h"
#include "cuda/runtime.h"

#include <algorithm>

namespace octavo::cuda {

// What a kernel can do on a device, asked once.
struct DecodeLimits {
    static constexpr int kMaxClusterLog2 = 2;

    int32_t num_ctas;
    bool has_dependent_launch;
    int max_clusters[kMaxClusterLog2 + 1] = {};  // at once, by the logarithm of their size

    template <class Config, class Kernel>
    static DecodeLimits ask(Kernel kernel, int32_t device) {
        constexpr size_t kSharedBytes = sizeof(DecodeShared<Config>);
        static_assert(kSharedBytes <= 227 * 1024);
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
              "cudaFuncSetAttribute");
        DecodeLimits limits;
        limits.num_ctas = std::min(num_sms(device), kMaxDecodeCtas);
        limits.has_dependent_launch = compute_capability(device) >= 90;
        if (!limits.has_dependent_launch) return limits;
        for (int log2 = 1; log2 <= kMaxClusterLog2; ++log2) {
            cudaLaunchAttribute attribute{};
            attribute.id = cudaLaunchAttributeClusterDimension;
            attribute.val.clusterDim = {1u << log2, 1, 1};
            cudaLaunchConfig_t config{};
            config.gridDim = dim3(1u << log2);
            config.blockDim = dim3(Config::kThreads);
            config.dynamicSmemBytes = kSharedBytes;
            config.attrs = &attribute;
            config.numAttrs = 1;
            check(cudaOccupancyMaxActiveClusters(&limits.max_clusters[log2], kernel, &config),
                  "cudaOccupancyMaxActiveClusters");
        }
        return limits;
    }

    // The size, as a logarithm, of `count` clusters that run at once on much of the device, or 0. Larger ones
    // than these start late: the SMs of one part of the device have to be free together.
    int32_t cluster_log2(int32_t count) const {
        for (int log2 = kMaxClusterLog2; log2 > 0; --log2) {
            if (count <= max_clusters[log2] && 3 * (count << log2) >= num_ctas) return log2;
        }
        return 0;
    }
};

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
    plan.cluster_log2 = params.batch == 1 ? limits.cluster_log2(params.num_kv_heads) : 0;
    const int32_t num_ctas =
        plan.cluster_log2 > 0 ? params.num_kv_heads << plan.cluster_log2 : limits.num_ctas;
    const size_t rows = size_t{1} * limits.num_ctas * Config::kRows;
    const DecodeWorkspace workspace =
        decode_workspace(params.device.index, stream, 2 * rows * Config::kPartialRow * sizeof(float), rows);
    plan.partial = static_cast<float*>(workspace.partial);
    plan.counters = workspace.counters;

    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(num_ctas);
    config.blockDim = dim3(Config::kThreads);
    config.dynamicSmemBytes = sizeof(DecodeShared<Config>);
    config.stream = stream;
    config.attrs = attributes;
    if (limits.has_dependent_launch) {
        // The launch overlaps the end of the kernel before it; the kernel waits for that one's results.
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (plan.cluster_log2 > 0) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {1u << plan.cluster_log2, 1, 1};
    }
    check(cudaLaunchKernelEx(&config, kernel, params, plan), params.op);
}

}  // namespace octavo::cuda
