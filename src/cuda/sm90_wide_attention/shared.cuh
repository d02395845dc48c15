// What the warps of a CTA of sm90_wide_attention share, and the rings through which they hand chunks on.
#pragma once

#include "cuda/ptx/mbarrier.h"
#include "cuda/sm90_attention/shared.cuh"
#include "cuda/sm90_wide_attention/tiles.h"

#include <cstdint>

namespace octavo::cuda {

// The weights of a tile, on their way from the scorer to the multipliers. Thread t of the scorer writes what
// thread t of each multiplier reads: operand a of the product, for 16 keys at a time.
struct Sm90WideWeights {
    uint4 pairs[Sm90WideConfig::kKeys / 16][128];
    float factor[Sm90WideConfig::kGroupRows];  // what sums so far are multiplied by, before they grow
};

struct Sm90WideShared {
    using Config = Sm90WideConfig;
    alignas(1024) unsigned char q[Config::kChunks][Config::kQChunkBytes];
    alignas(1024) unsigned char k[Config::kChunks][Config::kChunkBytes];
    alignas(1024) unsigned char v[Config::kChunks][Config::kChunkBytes];
    Sm90WideWeights weights[Config::kWeightSlots];
    Sm90Work work[kSm90WorkSlots];
    float scale[kSm90WorkSlots][Config::kGroupRows];  // what the rows' sums become results by

    // A slot is full when the phase of its `full` barrier completes, and free again when that of its `empty`
    // one does.
    uint64_t q_full[Config::kChunks], q_empty[Config::kChunks];
    uint64_t k_full[Config::kChunks], k_empty[Config::kChunks];
    uint64_t v_full[Config::kChunks], v_empty[Config::kChunks];
    uint64_t patch[Config::kChunks];  // for a chunk of V that the producer patches before it hands it on
    uint64_t weights_full[Config::kWeightSlots], weights_empty[Config::kWeightSlots];
    uint64_t work_full[kSm90WorkSlots], work_empty[kSm90WorkSlots];

    __device__ void init() {
        constexpr int kWarps = 4;  // of a warpgroup
        auto init = [](auto& full, int full_count, auto& empty, int empty_count) {
            for (uint64_t& barrier : full) ptx::mbarrier_init(&barrier, full_count);
            for (uint64_t& barrier : empty) ptx::mbarrier_init(&barrier, empty_count);
        };
        init(q_full, 1, q_empty, kWarps);
        init(k_full, 1, k_empty, Config::kCtas * kWarps);
        init(v_full, 1, v_empty, Config::kCtas * kWarps);
        init(weights_full, kWarps, weights_empty, Config::kMultipliers * kWarps);
        init(work_full, 1, work_empty, Config::kCtas * Config::kConsumerWarps + Config::kOtherTakers);
        for (uint64_t& barrier : patch) ptx::mbarrier_init(&barrier, 1);
        ptx::mbarrier_init_fence();
    }
};

// Tells both CTAs, which fill a chunk's slot together, that this warp is done with it.
__device__ __forceinline__ void release_chunk(uint64_t* empty) {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < Sm90WideConfig::kCtas) arrive_at<Sm90WideConfig>(empty, lane);
}

}  // namespace octavo::cuda
