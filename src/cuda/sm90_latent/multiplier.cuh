// The multipliers: two warpgroups, each of which multiplies weights with its half of the values.
#pragma once

#include "common/online_softmax.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90_latent/loader.cuh"
#include "cuda/sm90_latent/results.cuh"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/sm90_latent/work.cuh"

#include <cstdint>

namespace octavo::cuda {

// One of the two.
template <class T, int kHalf>
class Sm90LatentMultiplier {
  public:
    __device__ Sm90LatentMultiplier(const LatentAttentionParams& p, const LatentLaunch& launch,
                                    Sm90LatentShared& shared, const Sm90LatentWork& work)
        : p_(p), launch_(launch), shared_(shared), num_tiles_(work.num_tiles) {}

    __device__ void run(Sm90LatentLoader<kHalf>& loader) {
        int stage = 0;
        uint32_t parity = 0;
        for (int32_t i = 0; i < num_tiles_; ++i) {
            ptx::mbarrier_wait(&shared_.full_weights[stage], parity);
            scale_out(stage);
            multiply_values(stage);
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared_.empty[stage][kHalf]);
            if (threadIdx.x % 128 < 32) loader.load_next();
            if (++stage == kSm90LatentStages) {
                stage = 0;
                parity ^= 1;
            }
        }
        finish();
    }

  private:
    __device__ void scale_out(int stage) {
        const float factor[2] = {shared_.factor[stage][sm90_latent_row(0)],
                                 shared_.factor[stage][sm90_latent_row(1)]};
        if (__all_sync(~0u, factor[0] == 1.0f && factor[1] == 1.0f)) return;
#pragma unroll
        for (int j = 0; j < 128; ++j) out_[j] *= factor[j / 2 % 2];
    }

    // The scorer has waited for the keys before it handed over their weights.
    __device__ void multiply_values(int stage) {
        const uint32_t weights = ptx::shared_address(&shared_.weights(stage));
        const uint32_t values = ptx::shared_address(&shared_.keys[stage][kHalf * kSm90LatentHalfBlocks]);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            ptx::Wgmma<T, 256>::ss_values(
                out_, ptx::wgmma_descriptor(weights + 32 * k, 1),
                ptx::wgmma_descriptor(values + 16 * 128 * k, sizeof(Sm90LatentBlock)));
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(out_);
    }

    __device__ void finish() {
        ptx::named_barrier_sync(kSums, kSm90LatentThreads);
        const Sm90LatentWork work = Sm90LatentWork::make(p_, launch_);  // anew, since registers are few
        SoftmaxState states[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            states[i] = {shared_.sums.max[sm90_latent_row(i)], shared_.sums.sum[sm90_latent_row(i)]};
        finish_sm90_latent<T, kHalf>(p_, launch_, work, shared_, out_, states);
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    Sm90LatentShared& shared_;
    int32_t num_tiles_;
    float out_[128] = {};
};

}  // namespace octavo::cuda
