// Launches sm90_latent for one type of queries and kind of cache.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/sm90_latent/kernel.cuh"

#include <type_traits>

namespace octavo::cuda {

template <class T, Sm90LatentCache kCache>
void launch_sm90_latent(const LatentAttentionParams& params, const LatentPlan& plan,
                        const LatentLaunch& arguments, const CUtensorMap& map, cudaStream_t stream) {
    constexpr size_t kSharedBytes = sizeof(Sm90LatentShared);
    static_assert(kSharedBytes == kSm90LatentSharedBytes && kSharedBytes <= 227 * 1024);
    const Grid grid = plan.grid();
    const LaunchShape shape{dim3(grid.x, grid.y), kSm90LatentThreads, true, plan.cluster};
    const auto launch_kernel = [&](auto is_scheduled) {
        constexpr bool kIsScheduled = decltype(is_scheduled)::value;
        launch<sm90_latent_attention_kernel<T, kCache, kIsScheduled>, kSharedBytes>(
            "latent_attention", params.device.index, stream, shape, params, arguments, map);
    };
    if (plan.is_scheduled())
        launch_kernel(std::true_type{});
    else
        launch_kernel(std::false_type{});
}

}  // namespace octavo::cuda
