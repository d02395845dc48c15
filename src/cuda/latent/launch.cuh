// Launches the instances of the kernel of latent_attention for one type and cache.
#pragma once

#include "cuda/latent/kernel.cuh"
#include "cuda/launch.cuh"

namespace octavo::cuda {

template <class T, bool kIsFp8, int kRow>
void launch_latent(const LatentAttentionParams& params, const LatentPlan& plan, const LatentLaunch& arguments,
                   cudaStream_t stream) {
    constexpr LatentTiles kTiles = kLatentTiles[kRow];
    using Config = LatentConfig<T, kIsFp8, kTiles.keys, kTiles.stages>;
    constexpr auto kSharedBytes = static_cast<size_t>(kTiles.shared_bytes(kIsFp8));
    static_assert(kSharedBytes ==
                  kTiles.stages * KeyCopy<typename Config::Stored, Config::kKeys>::kTileBytes +
                      (kIsFp8 ? Config::kKeys * Config::kRowStride : 0) + sizeof(LatentShared<Config>));
    const Grid grid = plan.grid();
    const LaunchShape shape{dim3(grid.x, grid.y), kLatentThreads, true};
    launch<latent_attention_kernel<Config>, kSharedBytes>("latent_attention", params.device.index, stream,
                                                          shape, params, arguments);
}

}  // namespace octavo::cuda
