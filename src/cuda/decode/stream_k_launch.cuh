// One instance of the decode kernel, launched.
#pragma once

#include "cuda/decode/batch_invariant.cuh"
#include "cuda/decode/stream_k.cuh"
#include "cuda/runtime.h"
#include "cuda/workspace.h"

#include <algorithm>

namespace octavo::cuda {

// What a kernel can do on a device, asked once.
struct DecodeLimits {
    int32_t num_ctas;
    bool has_dependent_launch, pairs;

    template <class Config, class Shared, class Kernel>
    static DecodeLimits ask(Kernel kernel, int32_t device) {
        constexpr size_t kSharedBytes = sizeof(Shared);
        static_assert(kSharedBytes <= 227 * 1024);
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
              "cudaFuncSetAttribute");
        DecodeLimits limits{std::min(num_sms(device), kMaxDecodeCtas), cuda::has_dependent_launch(kernel),
                            false};
        if (!limits.has_dependent_launch) return limits;  // nor clusters
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

// `complete(plan, limits)` sets what is not common to all plans and tells whether CTAs go in clusters of two.
template <auto kKernel, class Config, class Shared, class Plan, class Complete>
void launch_decode_kernel(const AttentionParams& params, cudaStream_t stream, Complete complete) {
    static PerDevice<DecodeLimits> limits_of;
    const DecodeLimits& limits = limits_of.get(params.device.index, [&](int32_t device) {
        return DecodeLimits::ask<Config, Shared>(kKernel, device);
    });
    Plan plan;
    plan.group_size = FastDivide::by(params.group_size());
    plan.page_size = FastDivide::by(params.page_size);
    const bool pairs = complete(plan, limits);

    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(limits.num_ctas);
    config.blockDim = dim3(Config::kThreads);
    config.dynamicSmemBytes = sizeof(Shared);
    config.stream = stream;
    config.attrs = attributes;
    if (limits.has_dependent_launch) attributes[config.numAttrs++] = dependent_launch();
    if (pairs) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {2, 1, 1};
    }
    check(cudaLaunchKernelEx(&config, kKernel, params, plan), params.op);
}

template <class T, int kHeadDim, int kRowTiles>
void launch_stream_k_decode(const AttentionParams& params, cudaStream_t stream) {
    using Config = StreamKConfig<kHeadDim, kRowTiles>;
    launch_decode_kernel<stream_k_decode_kernel<T, kHeadDim, kRowTiles>, Config, StreamKShared<Config>,
                         StreamKLaunch>(params, stream, [&](StreamKLaunch& plan, const DecodeLimits& limits) {
        plan.pairs = limits.pairs;
        const size_t rows = size_t{1} * limits.num_ctas * Config::kRows;
        const PersistentWorkspace workspace = persistent_workspace(
            params.device.index, stream, 2 * rows * Config::kWarpPartialRow * sizeof(float), rows);
        plan.partial = static_cast<float*>(workspace.partial);
        plan.counters = workspace.counters;
        return limits.pairs;
    });
}

template <class T, int kHeadDim, int kRowTiles>
void launch_batch_invariant_decode(const AttentionParams& params, cudaStream_t stream) {
    using Config = DecodeConfig<kHeadDim, kRowTiles>;
    using Plan = BatchInvariantPlan<Config>;
    launch_decode_kernel<batch_invariant_decode_kernel<T, kHeadDim, kRowTiles>, Config,
                         BatchInvariantShared<Config>, Plan>(
        params, stream, [&](Plan& plan, const DecodeLimits& limits) {
            plan.units = Units<Config>(params.num_kv_heads);
            plan.num_rows = params.seqlen_q * params.group_size();
            // Prefix and window may each begin in a block of their own.
            const int64_t blocks = params.seqlen_k / kBlockKeys + 2;
            plan.max_units = plan.units.most(blocks);
            const int64_t runs = UnitRun<Config>::most(blocks * params.num_kv_heads * params.batch);
            const size_t rows = std::min<int64_t>(runs, limits.num_ctas) * plan.num_rows;
            plan.pushed = persistent_workspace(params.device.index, stream, 0,
                                               rows * plan.max_units * Config::kWarpPartialRow)
                              .counters;
            return false;
        });
}

}  // namespace octavo::cuda
