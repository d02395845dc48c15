// The instances of one row of kDecodeTiles of the kernels whose CTAs share out the work, launched.
#pragma once

#include "cuda/decode/batch_invariant.cuh"
#include "cuda/decode/plan.h"
#include "cuda/decode/stream_k.cuh"
#include "cuda/launch.cuh"
#include "cuda/workspace.h"

namespace octavo::cuda {

// Whether CTAs may be launched in clusters of two, so that no SM is left out. Asked once for each device.
template <auto kKernel, size_t kSharedBytes>
bool has_pairs(int32_t device, const LaunchShape& shape) {
    static PerDevice<bool> has_pairs_on;
    return has_pairs_on.get(device, [&](int32_t device) {
        if (!prepare_kernel<kKernel, kSharedBytes>(device).has_grid_dependency) return false;
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {2, 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(2);
        config.blockDim = dim3(shape.threads);
        config.dynamicSmemBytes = kSharedBytes;
        config.attrs = &attribute;
        config.numAttrs = 1;
        int max_clusters = 0;
        check(cudaOccupancyMaxActiveClusters(&max_clusters, kKernel, &config),
              "cudaOccupancyMaxActiveClusters");
        return 2 * max_clusters == static_cast<int>(shape.grid.x);
    });
}

template <class T, int kHeadDim, int kRowTiles>
void launch_stream_k_decode(const AttentionParams& params, const StreamKPlan& plan, cudaStream_t stream) {
    using Config = StreamKConfig<kHeadDim, kRowTiles>;
    constexpr auto kKernel = stream_k_decode_kernel<T, kHeadDim, kRowTiles>;
    constexpr size_t kSharedBytes = sizeof(StreamKShared<Config>);
    static_assert(kSharedBytes <= kDecodeSharedBytes);
    LaunchShape shape{dim3(plan.num_ctas), Config::kThreads, true};
    StreamKLaunch arguments{};
    arguments.group_size = FastDivide::by(params.group_size());
    arguments.page_size = FastDivide::by(params.page_size);
    arguments.pairs = has_pairs<kKernel, kSharedBytes>(params.device.index, shape);
    if (arguments.pairs) shape.cluster = 2;
    const PersistentWorkspace workspace =
        persistent_workspace(params.device.index, stream, plan.partial_bytes, plan.num_counters);
    arguments.partial = static_cast<float*>(workspace.partial);
    arguments.counters = workspace.counters;
    launch<kKernel, kSharedBytes>(params.op, params.device.index, stream, shape, params, arguments);
}

template <class T, int kHeadDim, int kRowTiles>
void launch_batch_invariant_decode(const AttentionParams& params, const BatchInvariantDecodePlan& plan,
                                   cudaStream_t stream) {
    using Config = DecodeConfig<kHeadDim, kRowTiles>;
    constexpr auto kKernel = batch_invariant_decode_kernel<T, kHeadDim, kRowTiles>;
    constexpr size_t kSharedBytes = sizeof(BatchInvariantShared<Config>);
    static_assert(kSharedBytes <= kDecodeSharedBytes);
    const LaunchShape shape{dim3(plan.num_ctas), Config::kThreads, true};
    BatchInvariantPlan<Config> arguments{};
    arguments.group_size = FastDivide::by(params.group_size());
    arguments.page_size = FastDivide::by(params.page_size);
    arguments.units = Units<Config>(params.num_kv_heads);
    arguments.num_rows = plan.num_rows;
    arguments.max_units = plan.max_splits;
    arguments.pushed = persistent_workspace(params.device.index, stream, 0, plan.workspace_words).counters;
    launch<kKernel, kSharedBytes>(params.op, params.device.index, stream, shape, params, arguments);
}

}  // namespace octavo::cuda
