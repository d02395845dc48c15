// The producer of latent_decode: the four warps of a warpgroup bring tiles of keys to shared memory by
// cp.async.
#pragma once

#include "cuda/latent_decode/tiles.cuh"
#include "cuda/ptx/l2_policy.h"
#include "cuda/ptx/mbarrier.h"

#include <cstdint>

namespace octavo::cuda {

// A warp has a quarter of the keys of each tile, and copies a few keys at a time, kLanes lanes each. Page
// numbers are read two tiles ahead.
template <class Config>
class LatentDecodeProducer {
  public:
    // All lanes of a warp construct it together; the schedule is not empty.
    __device__ LatentDecodeProducer(const LatentAttentionParams& p, const LatentLaunch& launch,
                                    LatentDecodeShared<Config>& shared,
                                    const LatentDecodeSchedule<Config>& schedule)
        : p_(p), launch_(launch), shared_(shared), schedule_(schedule), segment_(schedule.last()) {
        tile_ = segment_.begin;
    }

    __device__ void run() {
        constexpr int kAhead = 2;
        Places places[kAhead];
#pragma unroll
        for (Places& next : places) next = find_places();
        int stage = 0;
        uint32_t parity = 1;  // of fresh barriers
        for (int32_t left = schedule_.num_tiles(); left > 0;) {
#pragma unroll
            for (Places& next : places) {
                if (left == 0) break;
                ptx::mbarrier_wait(&shared_.empty[stage], parity);
                copy(next, stage);
                next = find_places();
                --left;
                if (++stage == Config::kStages) stage = 0, parity ^= 1;
            }
        }
    }

  private:
    static constexpr int kWarpKeys = Config::kKeys / 4;
    static constexpr int kLanes = Config::kFp8 ? 4 : 8;  // that copy a key
    static constexpr int kKeysAtOnce = 32 / kLanes, kGroups = kWarpKeys / kKeysAtOnce;

    // Where this lane's keys of a tile lie: their pages and slots. A slot below zero is past the last key.
    struct Places {
        int32_t pages[kGroups], slots[kGroups];
    };

    __device__ static int key_of(int group) {
        return threadIdx.x % 128 / 32 * kWarpKeys + group * kKeysAtOnce + threadIdx.x % 32 / kLanes;
    }

    // Finds the places of the next tile's keys. Page numbers may still be on their way.
    __device__ Places find_places() {
        Places places;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            const int32_t key = tile_ * Config::kKeys + key_of(i);
            places.pages[i] = 0;
            places.slots[i] = -1;
            if (key < segment_.end_key) {
                places.pages[i] =
                    p_.page_table[segment_.sequence * p_.page_table_stride + launch_.page_size.quotient(key)];
                places.slots[i] = launch_.page_size.remainder(key);
            }
        }
        if (++tile_ == segment_.end && !schedule_.is_first(segment_.sequence)) {
            segment_ = schedule_.before(segment_.sequence);
            tile_ = segment_.begin;
        }
        return places;
    }

    // Copies this warp's keys of a tile. Behind the last key there are zeros: 0 x NaN would spoil the sums.
    __device__ void copy(const Places& places, int stage) {
        const int piece = threadIdx.x % kLanes * 16;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            const bool is_key = places.slots[i] >= 0;
            const int64_t row =
                is_key ? places.pages[i] * p_.kv_page_stride + places.slots[i] * p_.kv_slot_stride : 0;
            const char* const from = static_cast<const char*>(p_.kv) +
                                     row * static_cast<int>(sizeof(typename Config::Stored)) + piece;
            const uint32_t to =
                ptx::shared_address(shared_.tiles[stage]) + key_of(i) * Config::kRowStride + piece;
#pragma unroll
            for (int byte = 0; byte < Config::kRowBytes; byte += 16 * kLanes)
                ptx::cp_async_16_evict_first(to + byte, from + byte, is_key);
        }
        ptx::cp_async_mbarrier_arrive(&shared_.full[stage]);
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    LatentDecodeShared<Config>& shared_;
    const LatentDecodeSchedule<Config>& schedule_;
    LatentSegment segment_;  // the segment and the tile whose places are found next
    int32_t tile_;
};

}  // namespace octavo::cuda
