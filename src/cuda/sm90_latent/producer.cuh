// The producer of a cache of 16 bits: one warp brings tiles of keys to shared memory with the copy engine.
#pragma once

#include "cuda/ptx/l2_policy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_latent/shared.cuh"

#include <cuda.h>

#include <cstdint>

namespace octavo::cuda {

// Loads the tiles of one work, half a tile at a time, in the order in which the halves are needed.
class Sm90LatentProducer {
  public:
    __device__ Sm90LatentProducer(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  const CUtensorMap& map, Sm90LatentShared& shared,
                                  const Sm90LatentWork& work)
        : p_(p),
          launch_(launch),
          map_(map),
          shared_(shared),
          work_(work),
          policy_(work.num_rows <= kSm90LatentRows ? ptx::kEvictFirst : ptx::kEvictNormal),
          box_keys_(min(p.page_size, kSm90LatentKeys)),
          lane_(threadIdx.x % 32) {}

    // All lanes of one warp call this. `phases` are those of the places of tiles (Sm90LatentPhases).
    __device__ void run(Sm90LatentPhases& phases) {
        int32_t pages[2] = {page_of_box(0), page_of_box(1)};
        for (int32_t pair = 0; 2 * pair < work_.num_tiles; ++pair) {
            const int32_t next[2] = {page_of_box(2 * pair + 2), page_of_box(2 * pair + 3)};
            for (int tile = 0; tile < 2; ++tile) {
                if (2 * pair + tile >= work_.num_tiles) break;
                load_half(2 * pair + tile, tile, tile, phases.of(tile), pages[tile]);
                load_half(2 * pair + tile, tile, 1 - tile, phases.of(tile), pages[tile]);
                phases.advance(tile);
            }
            pages[0] = next[0];
            pages[1] = next[1];
        }
    }

  private:
    // The page of this lane's box of the i-th tile, if it has one.
    __device__ int32_t page_of_box(int32_t i) const {
        if (i >= work_.num_tiles || lane_ * box_keys_ >= work_.keys_of(i)) return 0;
        const int32_t key = (work_.begin_tile + i) * kSm90LatentKeys + lane_ * box_keys_;
        return p_.page_table[work_.b * p_.page_table_stride + launch_.page_size.quotient(key)];
    }

    // Loads half `half` of the i-th tile. The rotary part comes with the half that belongs to the warpgroup
    // that does not make the tile's scores.
    __device__ void load_half(int32_t i, int tile, int half, uint32_t phase, int32_t page_of_lane) {
        constexpr int kHalfBlocks = Sm90LatentShared::kHalfBlocks;
        const int blocks = kHalfBlocks + (half != tile);
        const int boxes = (work_.keys_of(i) + box_keys_ - 1) / box_keys_;
        const int32_t slot = launch_.page_size.remainder((work_.begin_tile + i) * kSm90LatentKeys);
        ptx::mbarrier_wait(&shared_.empty[tile][half], phase ^ 1);
        if (lane_ == 0)
            ptx::mbarrier_arrive_expect(&shared_.full[tile][half], 128 * blocks * boxes * box_keys_);
        __syncwarp();
        for (int first = 0; first < blocks * boxes; first += 32) {
            const int copy = first + lane_, box = min(copy / blocks, boxes - 1), place = copy % blocks;
            const int32_t page = __shfl_sync(~0u, page_of_lane, box);
            if (copy >= blocks * boxes) continue;
            const int block = place < kHalfBlocks ? half * kHalfBlocks + place : 2 * kHalfBlocks;
            ptx::tma_load(shared_.keys[tile][block].rows[box * box_keys_], &map_, &shared_.full[tile][half],
                          policy_, 64 * block, slot, page, 0, 0);
        }
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    const CUtensorMap& map_;
    Sm90LatentShared& shared_;
    const Sm90LatentWork& work_;
    const uint64_t policy_;  // keys that no other CTA of this sequence reads leave the L2 cache first
    int32_t box_keys_;
    int lane_;
};

}  // namespace octavo::cuda
