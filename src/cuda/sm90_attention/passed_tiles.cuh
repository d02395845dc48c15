// The tiles that a CTA visits for some of its warpgroups alone (Config::kOwnTiles): the others pass over
// them.
//
//     block 0 keeps      7     5  4        1          the CTA loads 7 6 5 4 2 1
//     block 1 keeps      7  6        2                over block 1's rows, 5 and 4 are passed over between
//                                                     6 and 2, and 1 at the end
#pragma once

#include "cuda/sm90_attention/shared.cuh"

#include <algorithm>

namespace octavo::cuda {

// Frees the current slot, whose tile this warp does not use, once the tile is there: the next phase of the
// slot could not be told from this one otherwise.
template <class Config, int kSize>
__device__ __forceinline__ void free_slot(uint64_t* full, uint64_t* empty, Ring<kSize>& ring) {
    ptx::mbarrier_wait(&full[ring.slot], ring.parity);
    release_slot<Config>(empty, ring);
}

// Of one warpgroup: the tiles in front of its next own one, or at the end of a row tile, whose slots it has
// not freed yet.
template <class Config>
struct PassedTiles {
    int32_t count = 0;

    // While a product with V is due, the warpgroup holds the slot of that V, and waits for K of its next own
    // tile. If all slots of V and K lie in between, another warpgroup waits for a V that has no slot, and
    // does not free the slot that K needs. Far fewer are allowed here, with which products seldom end early.
    static constexpr int kMost = std::min(Config::kStages, Config::kVStages) / 2;
    __device__ __forceinline__ bool too_many() const { return count > kMost; }
    // Frees their slots of K, and returns their number. Those of V follow, behind the V that lies in front.
    __device__ __forceinline__ int32_t free_keys(Sm90Shared<Config>& shared, Ring<Config::kStages>& ring) {
        const int32_t passed = count;
        if constexpr (Config::kOwnTiles) {
            for (; count > 0; --count) free_slot<Config>(shared.k_full, shared.k_empty, ring);
        }
        return passed;
    }
    __device__ __forceinline__ static void free_values(Sm90Shared<Config>& shared,
                                                       Ring<Config::kVStages>& ring, int32_t passed) {
        if constexpr (Config::kOwnTiles) {
            for (; passed > 0; --passed) free_slot<Config>(shared.v_full, shared.v_empty, ring);
        }
    }
    // The same of both, where no product is due.
    __device__ __forceinline__ void free(Sm90Shared<Config>& shared, Ring<Config::kStages>& k_ring,
                                         Ring<Config::kVStages>& v_ring) {
        if constexpr (Config::kOwnTiles) {
            for (; count > 0; --count) {
                free_slot<Config>(shared.k_full, shared.k_empty, k_ring);
                free_slot<Config>(shared.v_full, shared.v_empty, v_ring);
            }
        }
    }
};

}  // namespace octavo::cuda
