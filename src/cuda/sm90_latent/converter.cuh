// The producer of a cache of fp8: the four warps of a warpgroup put keys into shared memory as float16, where
// consumers find them as the copy engine would have left them.
//
// Codes go from global memory straight to registers; those of the next half of a tile are on their way while
// the warps wait for its place. There are not enough registers for more, so that a tile is brought to the L2
// cache two tiles ahead.
#pragma once

#include "cuda/ptx/l2_policy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/tile/code_numbers.cuh"

#include <cstdint>

namespace octavo::cuda {

// A warp has 16 keys of each tile, in two groups of eight. A load takes 64 codes of each key of a group, four
// lanes a key, so that lanes that store at once store to different banks.
class Sm90LatentConverter {
  public:
    __device__ Sm90LatentConverter(const LatentAttentionParams& p, const LatentLaunch& launch,
                                   Sm90LatentShared& shared, const Sm90LatentWork& work)
        : p_(p),
          launch_(launch),
          shared_(shared),
          work_(work),
          pages_(p.page_table.from(work.b * p.page_table_stride)),
          end_key_(min(work.end_key, (work.begin_tile + work.num_tiles) * kSm90LatentKeys)),
          key_(work.begin_tile * kSm90LatentKeys + threadIdx.x % 128 / 32 * kWarpKeys + lane() % kWarpKeys) {}

    // `phases` are those of the places of tiles (Sm90LatentPhases).
    __device__ void run(Sm90LatentPhases& phases) {
        find_page();
        find_next_keys();
        begin_tile();
        load_half(0);
        for (int32_t pair = 0; 2 * pair < work_.num_tiles; ++pair) {
            convert_tile<0>(phases);
            if (2 * pair + 1 < work_.num_tiles) convert_tile<1>(phases);
        }
    }

  private:
    using Block = Sm90LatentShared::Block;
    static constexpr int kHalfBlocks = Sm90LatentShared::kHalfBlocks;
    static constexpr int kWarpKeys = kSm90LatentKeys / 4, kGroups = kWarpKeys / 8;

    __device__ static int lane() { return threadIdx.x % 32; }

    // Starts to load the page of this lane's key.
    __device__ void find_page() {
        if (key_ < end_key_) page_ = pages_[launch_.page_size.quotient(key_)];
    }
    // Finds where this lane's key of the next tile begins, and brings it to the L2 cache.
    __device__ void find_next_keys() {
        next_key_ = nullptr;
        if (key_ < end_key_) {
            next_key_ = static_cast<const uint8_t*>(p_.kv) + page_ * p_.kv_page_stride +
                        launch_.page_size.remainder(key_) * p_.kv_slot_stride;
            constexpr int kLine = 128;
#pragma unroll
            for (int i = 0; i <= kLatentQkDim / kLine; i += 2) {  // two lanes have the same key
                const int column = (i + lane() / kWarpKeys) * kLine;
                ptx::prefetch_l2(next_key_ + min(column, kLatentQkDim - 1));
            }
        }
        key_ += kSm90LatentKeys;
        find_page();
    }
    __device__ void begin_tile() {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const auto key = __shfl_sync(~0u, reinterpret_cast<uint64_t>(next_key_), 8 * g + lane() / 4);
            keys_[g] = reinterpret_cast<const uint8_t*>(key);
        }
        find_next_keys();
    }

    // Loads 16 codes of each of a group's keys; zeros behind the last key.
    __device__ uint4 load(int group, int column) const {
        uint4 codes = make_uint4(0, 0, 0, 0);
        if (keys_[group]) {
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(codes.x), "=r"(codes.y), "=r"(codes.z), "=r"(codes.w)
                         : "l"(keys_[group] + lane() % 4 * 16 + column));
        }
        return codes;
    }
    __device__ void load_half(int half) {
#pragma unroll
        for (int i = 0; i < kGroups * kHalfBlocks; ++i)
            codes_[i] = load(i / kHalfBlocks, 64 * (half * kHalfBlocks + i % kHalfBlocks));
    }
    __device__ void load_rotary() {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) codes_[kGroups * kHalfBlocks + g] = load(g, kLatentVDim);
    }

    // Converts 16 codes, and stores them as two pieces of a key's row of a block.
    __device__ static void store(const uint4& codes, int group, Block& block) {
        const CodeNumbers<DType::float8_e4m3fn, false> numbers(0);
        uint32_t pairs[8];
        numbers.convert(codes.x, &pairs[0]);
        numbers.convert(codes.y, &pairs[2]);
        numbers.convert(codes.z, &pairs[4]);
        numbers.convert(codes.w, &pairs[6]);
        const int key = threadIdx.x % 128 / 32 * kWarpKeys + lane() / 4;
        const int first = 2 * (lane() % 4) ^ key % 8;
        auto* const pieces = reinterpret_cast<uint4*>(block.rows[key + 8 * group]);
        pieces[first] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        pieces[first ^ 1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    }
    __device__ void store_half(int tile, int half) const {
#pragma unroll
        for (int i = 0; i < kGroups * kHalfBlocks; ++i)
            store(codes_[i], i / kHalfBlocks, shared_.keys[tile][half * kHalfBlocks + i % kHalfBlocks]);
    }
    __device__ void store_rotary(int tile) const {
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
            store(codes_[kGroups * kHalfBlocks + g], g, shared_.keys[tile][2 * kHalfBlocks]);
    }

    // Converts both halves of a tile, the one of its own warpgroup first, and the rotary part with the other.
    template <int kTile>
    __device__ void convert_tile(Sm90LatentPhases& phases) {
        constexpr int kOther = 1 - kTile;
        const uint32_t parity = phases.of(kTile) ^ 1;
        ptx::mbarrier_wait(&shared_.empty[kTile][kTile], parity);
        store_half(kTile, kTile);
        hand_over(kTile, kTile);
        load_half(kOther);
        load_rotary();
        ptx::mbarrier_wait(&shared_.empty[kTile][kOther], parity);
        store_half(kTile, kOther);
        store_rotary(kTile);
        hand_over(kTile, kOther);
        begin_tile();
        load_half(kOther);  // of the next tile, whose own half this is
        phases.advance(kTile);
    }
    // The consumers execute the fence that wgmma needs.
    __device__ void hand_over(int tile, int half) {
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(&shared_.full[tile][half]);
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    Sm90LatentShared& shared_;
    const Sm90LatentWork& work_;
    const IndexArray pages_;
    const int32_t end_key_;              // the CTA's keys are below this one
    int32_t key_;                        // this lane's key of the tile behind the next one
    int64_t page_ = 0;                   // where that key lies
    const uint8_t* next_key_ = nullptr;  // where this lane's key of the next tile begins; null: there is none
    const uint8_t* keys_[kGroups];       // where the current tile's key of this lane in each group begins
    uint4 codes_[kGroups * (kHalfBlocks + 1)];
};

}  // namespace octavo::cuda
