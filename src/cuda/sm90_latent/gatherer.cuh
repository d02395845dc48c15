// The producer of a cache of 16 bits whose pages are too small for the copy engine: the four warps of a
// warpgroup copy keys one by one to where the copy engine would have put them.
#pragma once

#include "cuda/ptx/mbarrier.h"
#include "cuda/sm90_latent/shared.cuh"

#include <cstdint>

namespace octavo::cuda {

// A warp has 16 keys of each tile, and copies the 128 bytes that four of them have in a block at a time.
class Sm90LatentGatherer {
  public:
    __device__ Sm90LatentGatherer(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  Sm90LatentShared& shared, const Sm90LatentWork& work)
        : p_(p),
          launch_(launch),
          shared_(shared),
          work_(work),
          pages_(p.page_table.from(work.b * p.page_table_stride)) {}

    // `phases` are those of the places of tiles (Sm90LatentPhases).
    __device__ void run(Sm90LatentPhases& phases) {
        const unsigned char* key = find_key(0);
        for (int32_t i = 0; i < work_.num_tiles; ++i) {
            const int tile = i % 2;
            const unsigned char* const next = find_key(i + 1);
            // The rotary part comes with the half that belongs to the warpgroup that does not make the tile's
            // scores.
            gather_half<false>(tile, tile, phases.of(tile), key);
            gather_half<true>(tile, 1 - tile, phases.of(tile), key);
            phases.advance(tile);
            key = next;
        }
    }

  private:
    static constexpr int kHalfBlocks = Sm90LatentShared::kHalfBlocks;
    static constexpr int kWarpKeys = kSm90LatentKeys / 4;

    __device__ static int lane() { return threadIdx.x % 32; }
    __device__ static int first_row() { return threadIdx.x % 128 / 32 * kWarpKeys; }

    // Where this lane's key of the i-th tile begins; null: there is none.
    __device__ const unsigned char* find_key(int32_t i) const {
        const int row = first_row() + lane() % kWarpKeys;
        if (i >= work_.num_tiles || row >= work_.keys_of(i)) return nullptr;
        const int32_t key = (work_.begin_tile + i) * kSm90LatentKeys + row;
        return static_cast<const unsigned char*>(p_.kv) +
               2 * (pages_[launch_.page_size.quotient(key)] * p_.kv_page_stride +
                    launch_.page_size.remainder(key) * p_.kv_slot_stride);
    }

    // Starts to copy this warp's keys of half a tile, swizzled as the copy engine does it, with zeros behind
    // the last key. Each lane arrives once its copies are complete.
    template <bool kWithRotary>
    __device__ void gather_half(int tile, int half, uint32_t phase, const unsigned char* key) const {
        const int column = lane() % 8 * 16;
        ptx::mbarrier_wait(&shared_.empty[tile][half], phase ^ 1);
        unsigned char* const blocks = shared_.keys[tile][half * kHalfBlocks].rows[first_row() + lane() / 8];
        unsigned char* const rotary = shared_.keys[tile][2 * kHalfBlocks].rows[first_row() + lane() / 8];
#pragma unroll
        for (int row = 0; row < kWarpKeys; row += 4) {
            const auto own = __shfl_sync(~0u, reinterpret_cast<uint64_t>(key), row + lane() / 8);
            const bool is_key = own != 0;
            const auto* const from = is_key ? reinterpret_cast<const unsigned char*>(own) + column
                                            : static_cast<const unsigned char*>(p_.kv);
            const int to = row * 128 + (column ^ (row % 8 + lane() / 8) * 16);
#pragma unroll
            for (int block = 0; block < kHalfBlocks; ++block) {
                ptx::cp_async_16(ptx::shared_address(blocks + block * sizeof(Sm90LatentShared::Block) + to),
                                 from + (is_key ? (half * kHalfBlocks + block) * 128 : 0), is_key);
            }
            if constexpr (kWithRotary) {
                ptx::cp_async_16(ptx::shared_address(rotary + to),
                                 from + (is_key ? 2 * kHalfBlocks * 128 : 0), is_key);
            }
        }
        ptx::cp_async_mbarrier_arrive(&shared_.full[tile][half]);
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    Sm90LatentShared& shared_;
    const Sm90LatentWork& work_;
    const IndexArray pages_;
};

}  // namespace octavo::cuda
