// The loads of a cache of 16 bits: the first warp of each multiplier brings its half of the keys to shared
// memory with the copy engine.
#pragma once

#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/sm90_latent/work.cuh"

#include <cuda.h>

#include <cstdint>

namespace octavo::cuda {

// Loads one half of each tile, the second with the rotary part.
template <int kHalf>
class Sm90LatentLoader {
  public:
    __device__ Sm90LatentLoader(const LatentAttentionParams& p, const LatentLaunch& launch,
                                const CUtensorMap& map, Sm90LatentShared& shared, const Sm90LatentWork& work)
        : p_(p), launch_(launch), map_(map), shared_(shared), work_(work), page_(page_of_box(0)) {}

    // Loads the next tile, if there is one, once its place is empty. All lanes of one warp call this.
    __device__ void load_next() {
        if (next_ >= work_.num_tiles) return;
        constexpr int kFirst = kHalf * kSm90LatentHalfBlocks, kBlocks = kSm90LatentHalfBlocks + kHalf;
        const int box_keys = min(p_.page_size, kSm90LatentKeys);
        const int boxes = (work_.keys_of(next_) + box_keys - 1) / box_keys;
        const int32_t slot = launch_.page_size.remainder((work_.begin_tile + next_) * kSm90LatentKeys);
        const int stage = next_ % kSm90LatentStages;
        uint64_t* const full = &shared_.full[stage][kHalf];
        wait_until_empty(stage);
        if (lane() == 0) ptx::mbarrier_arrive_expect(full, 128 * kBlocks * boxes * box_keys);
        __syncwarp();
        for (int first = 0; first < kBlocks * boxes; first += 32) {
            const int copy = first + lane(), box = min(copy / kBlocks, boxes - 1);
            const int block = kFirst + copy % kBlocks;
            const int32_t page = __shfl_sync(~0u, page_, box);
            if (copy >= kBlocks * boxes) continue;
            ptx::tma_load(shared_.keys[stage][block].rows[box * box_keys], &map_, full, 64 * block, slot,
                          page, 0, 0);
        }
        page_ = page_of_box(++next_);
    }

  private:
    __device__ static int lane() { return threadIdx.x % 32; }

    // Waits for the multiplier of this half; and for the other one, which reads the weights, too, where the
    // rotary part comes. The last stage is not empty at first: queries are there until the scorer has them.
    __device__ void wait_until_empty(int stage) const {
        const bool was_empty = stage != kSm90LatentStages - 1;
        const uint32_t parity = (next_ / kSm90LatentStages & 1) ^ was_empty;
        ptx::mbarrier_wait(&shared_.empty[stage][kHalf], parity);
        if constexpr (kHalf == 1) ptx::mbarrier_wait(&shared_.empty[stage][0], parity);
    }

    // The page of this lane's box of the i-th tile, if it has one.
    __device__ int32_t page_of_box(int32_t i) const {
        const int box_keys = min(p_.page_size, kSm90LatentKeys);
        if (i >= work_.num_tiles || lane() * box_keys >= work_.keys_of(i)) return 0;
        const int32_t key = (work_.begin_tile + i) * kSm90LatentKeys + lane() * box_keys;
        return p_.page_table[work_.b * p_.page_table_stride + launch_.page_size.quotient(key)];
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    const CUtensorMap& map_;
    Sm90LatentShared& shared_;
    const Sm90LatentWork& work_;
    int32_t next_ = 0, page_;
};

}  // namespace octavo::cuda
