// What the warps of a CTA of sm90_attention share, and the rings through which they hand tiles on.
#pragma once

#include "common/online_softmax.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_attention/work.cuh"
#include "cuda/types.h"

#include <algorithm>

namespace octavo::cuda {

constexpr int kSm90WorkSlots = 2;

// ALiBi of a tile's columns as a product of two matrices in bfloat16, whatever the type of the inputs: the
// slope of each row, in three terms that together are exact, times each key's place in the tile. A product
// takes 16 columns, which wgmma_descriptor_plain makes of eight; every place thus counts twice, so the places
// are halved.
template <class Config, bool kUsed = Config::kAlibiProduct>
struct PrefillAlibi {
    __device__ void init() {}
};
template <class Config>
struct PrefillAlibi<Config, true> {
    alignas(128) uint4 columns[Config::kKeys];
    alignas(128) uint4 slopes[Config::kConsumers][Config::kGroupRows];
    uint4 unread[Config::kGroupRows];  // compute-sanitizer believes that a product reads twice the bytes

    __device__ void init() {
        for (int key = threadIdx.x; key < Config::kKeys; key += Config::kThreads) {
            const float place = 0.5f * key;
            columns[key] = make_uint4(pack<bfloat16>(place, place), pack<bfloat16>(place, 0.0f), 0, 0);
        }
        ptx::fence_proxy_async();
    }
    __device__ void set_slope(int group, int row, float slope) {
        const float high = __bfloat162float(__float2bfloat16(slope));
        const float middle = __bfloat162float(__float2bfloat16(slope - high));
        slopes[group][row] =
            make_uint4(pack<bfloat16>(high, middle), pack<bfloat16>(slope - high - middle, 0.0f), 0, 0);
    }
};

// Where one warpgroup's rows of a row tile lie in q or out: coordinates of the tensor that Sm90Launch
// describes.
struct QueryPlace {
    bool any;  // whether it has rows here
    int32_t first_head, place, shift, outer;

    // `batch_stride`: the stride of q or out.
    __device__ QueryPlace(const AttentionParams& p, const Sm90Launch& plan, const Sm90Work& work, int block,
                          int64_t batch_stride)
        : any(work.first_token + block * plan.tokens < work.seqlen_q),
          first_head(work.first_head),
          place(plan.q_edge - work.seqlen_q + work.first_token + block * plan.tokens),
          shift(work.q_begin + work.seqlen_q),
          outer(p.cu_seqlens_q || batch_stride == 0 ? 0 : work.batch) {}
};

// Over codes, queries are made ready between the copy engine and the consumers (query_converter.cuh).
template <class Config, bool kUsed = Config::kHasCodes>
struct QueryScales {
    __device__ void init() {}
};
template <class Config>
struct QueryScales<Config, true> {
    uint64_t loaded[Config::kQSlots][Config::kConsumers];  // completes where q_full would elsewhere
    // The factors that dot products, and results, have yet to be multiplied by.
    float2 scales[Config::kQSlots][Config::kConsumers];

    __device__ void init() {
        for (auto& slot : loaded) {
            for (uint64_t& barrier : slot) ptx::mbarrier_init(&barrier, 1);
        }
    }
};

template <class Config>
struct Sm90Shared {
    alignas(1024) unsigned char q[Config::kQSlots][Config::kConsumers][Config::kQTileBytes];
    alignas(1024) unsigned char k[Config::kStages][Config::kKeyTileBytes];
    alignas(1024) unsigned char v[Config::kVStages][Config::kValueTileBytes];
    PrefillAlibi<Config> alibi;
    Sm90Work work[kSm90WorkSlots];
    // For a row tile of few rows: the softmax state of each consumer warp's share of the keys.
    SoftmaxState parts[4 * Config::kConsumers][std::max(8 * Config::kFewRowTiles, 1)];

    // A slot is full when the phase of its `full` barrier completes, and free again when that of its `empty`
    // one does.
    uint64_t q_full[Config::kQSlots][Config::kConsumers], q_empty[Config::kQSlots][Config::kConsumers];
    uint64_t k_full[Config::kStages], k_empty[Config::kStages];
    uint64_t v_full[Config::kVStages], v_empty[Config::kVStages];
    // The result lies in the slot of its queries.
    uint64_t out_full[Config::kQSlots][Config::kConsumers];
    uint64_t work_full[kSm90WorkSlots], work_empty[kSm90WorkSlots];
    uint64_t work_wanted;  // tells a warp that only hands out work to draw another item
    uint32_t complete[Config::kQSlots][Config::kConsumers];  // splits: whether the slot holds a result
    uint64_t patch[Config::kVStages];  // for a tile of V that the producer patches before it hands it on
    QueryScales<Config> query_scales;
    // Where keys are gathered: the place in `out` of the result that each slot holds, or will hold.
    QueryPlace result_places[Config::kQSlots][Config::kGathers ? Config::kConsumers : 1];

    __device__ void init() {
        constexpr int kConsumerWarps = 4 * Config::kConsumers;
        query_scales.init();
        for (int slot = 0; slot < Config::kQSlots; ++slot) {
            for (int group = 0; group < Config::kConsumers; ++group) {
                ptx::mbarrier_init(&q_full[slot][group], 1);
                ptx::mbarrier_init(&q_empty[slot][group], 1);
                ptx::mbarrier_init(&out_full[slot][group], 4);
                if constexpr (Config::kGathers) result_places[slot][group].any = false;
            }
        }
        for (int stage = 0; stage < Config::kStages; ++stage) {
            ptx::mbarrier_init(&k_full[stage], Config::kTileArrivals);
            ptx::mbarrier_init(&k_empty[stage], Config::kCtas * kConsumerWarps);
        }
        for (int stage = 0; stage < Config::kVStages; ++stage) {
            ptx::mbarrier_init(&v_full[stage], Config::kTileArrivals);
            ptx::mbarrier_init(&v_empty[stage], Config::kCtas * kConsumerWarps);
            ptx::mbarrier_init(&patch[stage], 1);
        }
        for (int slot = 0; slot < kSm90WorkSlots; ++slot) {
            ptx::mbarrier_init(&work_full[slot], 1);
            ptx::mbarrier_init(&work_empty[slot], Config::kCtas * kConsumerWarps + Config::kOtherTakers);
        }
        ptx::mbarrier_init(&work_wanted, 1);
        ptx::mbarrier_init_fence();
    }
};

// A place in a ring of slots, and the parity of the phase that fills it next.
template <int kSize>
struct Ring {
    int slot = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kSize) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// Arrives at this barrier of CTA `rank` of the cluster.
template <class Config>
__device__ __forceinline__ void arrive_at(uint64_t* barrier, uint32_t rank) {
    if constexpr (Config::kCtas == 1) {
        ptx::mbarrier_arrive(barrier);
    } else {
        ptx::mbarrier_arrive_cluster(ptx::cluster_address(ptx::shared_address(barrier), rank));
    }
}

// Tells every CTA that fills the current slot that this warp of a consumer is done with it.
template <class Config, int kSize>
__device__ __forceinline__ void release_slot(uint64_t* empty, Ring<kSize>& ring) {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < Config::kCtas) arrive_at<Config>(&empty[ring.slot], lane);
    ring.advance();
}

// Takes the next row tile from the ring; every lane of a warp calls this. Lane 0 alone reads the slot, so
// that its arrival at the barrier of the CTA whose scheduler fills the ring frees the slot. Without kFrees,
// the slot stays, and the next call gets the same row tile.
template <class Config, bool kFrees = true, class Shared>
__device__ __forceinline__ Sm90Work take_work(Shared& shared, Ring<kSm90WorkSlots>& ring) {
    ptx::mbarrier_wait(&shared.work_full[ring.slot], ring.parity);
    Sm90Work work{};
    if (threadIdx.x % 32 == 0) {
        work = shared.work[ring.slot];
        if (kFrees) arrive_at<Config>(&shared.work_empty[ring.slot], 0);
    }
    if (kFrees) ring.advance();
    return work.from_lane_0();
}

// The tiles of keys that a row tile, or one split of it, visits, from the last to the first: last(), then
// before(i) of the current one, until that is negative.
template <bool kSplits>
struct PrefillKeyTiles : KeyTiles {
    int32_t first = 0;

    __device__ int32_t start(int32_t i) const { return KeyTiles::start(kSplits ? first + i : i); }
    __device__ int32_t last() const { return count - 1; }
    __device__ int32_t before(int32_t i) const { return i - 1; }
};

// Those of these tiles that a block mask keeps for some of the row tile's blocks of queries. A warp looks at
// the mask of 32 tiles at once, and all warps find the same. It walks through all of them by last() and
// before(), or through those of its own block by next_own().
template <class Config>
class BlockKeyTiles : public PrefillKeyTiles<false> {
  public:
    // `block`: the block of queries, counted in the row tile, whose tiles next_own() finds.
    __device__ BlockKeyTiles(const AttentionParams& p, const Sm90Work& work, const KeyTiles& tiles,
                             int32_t end_token, int block)
        : PrefillKeyTiles<false>{tiles},
          rows_(p.block_mask.row(work.batch, work.first_head, work.first_token)),
          row_stride_(p.block_mask.row_stride),
          num_rows_((end_token - work.first_token - 1) / Config::kBlockSize + 1),
          block_(block),
          chunk_((count + 31) / 32) {}

    // To be called once, and then before() of what was found last.
    __device__ int32_t last() { return next(); }
    __device__ int32_t before(int32_t) { return next(); }

    // The next tile that the own block of queries keeps; -1 if there is none. Adds to `passed` how many tiles
    // lie before it, or are left, that are kept for other blocks alone.
    __device__ int32_t next_own(int32_t& passed) {
        while (own_ == 0) {
            passed += __popc(left_);
            if (chunk_ == 0) {
                left_ = 0;
                return -1;
            }
            look(--chunk_);
        }
        const int bit = 31 - __clz(own_);
        const uint32_t below = (1u << bit) - 1;
        passed += __popc(left_ & ~below) - 1;
        left_ &= below;
        own_ &= below;
        return 32 * chunk_ + bit;
    }

  private:
    // The next kept tile towards the first; -1 if there is none.
    __device__ int32_t next() {
        while (left_ == 0) {
            if (chunk_ == 0) return -1;
            look(--chunk_);
        }
        const int bit = 31 - __clz(left_);
        left_ ^= 1u << bit;
        return 32 * chunk_ + bit;
    }
    __device__ void look(int32_t chunk) {
        const int32_t i = 32 * chunk + static_cast<int32_t>(threadIdx.x % 32);
        const uint8_t* column = rows_ + (i < count ? start(i) / Config::kBlockSize : 0);
        left_ = 0;
#pragma unroll
        for (int row = 0; row < Config::kQueryBlocks; ++row) {
            const uint32_t kept = __ballot_sync(~0u, i < count && row < num_rows_ && *column != 0);
            left_ |= kept;
            if (Config::kOwnTiles && row == block_) own_ = kept;
            if (row + 1 < num_rows_) column += row_stride_;
        }
    }

    const uint8_t* rows_;  // [query blocks of the row tile, key blocks]
    int64_t row_stride_;
    int32_t num_rows_;
    int block_;
    // The 32 tiles from 32 chunk_ on: which of them some block keeps, and which of these the own one, and are
    // still to be found.
    int32_t chunk_;
    uint32_t left_ = 0, own_ = 0;
};

template <class Config>
__device__ __forceinline__ auto key_tiles(const AttentionParams& p, const Sm90Launch& plan,
                                          const Sm90Work& work, int own_block = 0) {
    const int32_t end = min(work.first_token + Config::kTileBlocks * plan.tokens, work.seqlen_q);
    PrefillKeyTiles<Config::kSplits> tiles{KeyTiles(work.visibility<Config>(p, work.first_token, end),
                                                    work.q_pos(work.first_token), work.q_pos(end - 1),
                                                    Config::kKeys)};
    if (Config::kSplits && work.is_split()) {
        const int32_t split = work.split(), num_splits = work.num_splits();
        tiles.first = tiles.count * split / num_splits;
        tiles.count = tiles.count * (split + 1) / num_splits - tiles.first;
    }
    if constexpr (Config::kBlocks) {
        return BlockKeyTiles<Config>(p, work, tiles, end, own_block);
    } else {
        return tiles;
    }
}

}  // namespace octavo::cuda
