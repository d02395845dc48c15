// Launches sm90_latent for one type of queries and kind of cache.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/sm90_latent/fp8_kernel.cuh"
#include "cuda/sm90_latent/kernel.cuh"

namespace octavo::cuda {

// Over fp8 the map is not used.
template <class T, bool kIsFp8>
void launch_sm90_latent(const LatentAttentionParams& params, const LatentPlan& plan,
                        const LatentLaunch& arguments, const CUtensorMap& map, cudaStream_t stream) {
    const Grid grid = plan.grid();
    const LaunchShape shape{dim3(grid.x, grid.y), kSm90LatentThreads, true, plan.cluster};
    const char* const op = "latent_attention";
    if constexpr (kIsFp8) {
        constexpr size_t kSharedBytes = sizeof(Sm90LatentFp8Shared);
        static_assert(kSharedBytes == kSm90LatentFp8SharedBytes && kSharedBytes <= 227 * 1024);
        launch<sm90_latent_fp8_attention_kernel<T>, kSharedBytes>(op, params.device.index, stream, shape,
                                                                  params, arguments);
    } else {
        constexpr size_t kSharedBytes = sizeof(Sm90LatentShared);
        static_assert(kSharedBytes == kSm90LatentSharedBytes && kSharedBytes <= 227 * 1024);
        launch<sm90_latent_attention_kernel<T>, kSharedBytes>(op, params.device.index, stream, shape, params,
                                                              arguments, map);
    }
}

}  // namespace octavo::cuda
