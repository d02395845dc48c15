// What CTAs of sm90_latent leave of sequences whose keys several runs of a schedule share, for
// combine_sm90_latent_kernel.
//
// A run shares at most two sequences with other runs: the one in which it begins, and the one in which it
// ends. So a CTA has two slots. The sums of a slot lie as the threads of the two consumer warpgroups have
// them: pieces of two columns of two rows, those of all threads one behind the other.
#pragma once

#include "cuda/latent/parameters.h"
#include "cuda/latent/plan.h"

#include <cstdint>

namespace octavo::cuda {

struct Sm90LatentSlot {
    float4* sums;    // [32 pieces, 256 threads]
    float2* states;  // of each row: the maximum, in units of log2(e), and the sum

    static constexpr int kPieceStride = 256;

    // The slot of a CTA for the sequence in which its run begins, if that has keys before the run, or for the
    // one in which its run ends.
    __device__ static Sm90LatentSlot of(const LatentLaunch& launch, int32_t cta, bool has_earlier_keys) {
        const int64_t slots = int64_t{2} * cta + (has_earlier_keys ? 0 : 1);
        float* const slot = launch.partial_out + slots * kSm90LatentSlotNumbers;
        return {reinterpret_cast<float4*>(slot),
                reinterpret_cast<float2*>(slot + kSm90LatentRows * kLatentVDim)};
    }
};

}  // namespace octavo::cuda
