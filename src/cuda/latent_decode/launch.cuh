// Launches latent_decode for one type of queries and kind of cache.
#pragma once

#include "cuda/latent_decode/kernel.cuh"
#include "cuda/launch.cuh"

namespace octavo::cuda {

template <class T, bool kIsFp8>
void launch_latent_decode(const LatentAttentionParams& params, const LatentPlan& plan,
                          const LatentLaunch& arguments, cudaStream_t stream) {
    using Config = LatentDecodeConfig<T, kIsFp8>;
    constexpr size_t kSharedBytes = sizeof(LatentDecodeShared<Config>);
    static_assert(kSharedBytes == latent_decode_shared_bytes(kIsFp8));
    const LaunchShape shape{dim3(plan.grid().x), kLatentDecodeThreads, true};
    launch<latent_decode_kernel<Config>, kSharedBytes>("latent_attention", params.device.index, stream, shape,
                                                       params, arguments);
}

}  // namespace octavo::cuda
