// The shared memory of a CTA, and the facts about its work, which the scheduler computes.
#pragma once

#include "common/query_range.h"
#include "cuda/attention_backward/find_head_tile.cuh"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_backward/parameters.h"
#include "cuda/sm90_backward/tiles.h"

#include <cstdint>

namespace octavo::cuda {

constexpr int kTileSlots = 2;  // tiles of keys whose facts lie in shared memory

// A step where a mask hides blocks. The loader writes it before the queries arrive.
template <class Config>
struct Sm90KeptStep {
    // Queries of a head that look at keys of the CTA: the first of kPartQueries of them in their sequence,
    // and their place among the parts of workspace.
    struct alignas(16) Part {
        int32_t head, first_query, place;
    };
    Part parts[Config::kParts];
    // A byte for each part (Sm90KeptFlags), and at the end whether it is the last step of its tile of keys.
    alignas(4) uint8_t flags[4];
};

template <class Config, bool kUsed = Config::kBlocks>
struct Sm90KeptSteps {};
template <class Config>
struct Sm90KeptSteps<Config, true> {
    // Up to 32 parts are found at once, and consumers may still read the three steps before.
    static constexpr int kSteps = 64 / Config::kParts;
    Sm90KeptStep<Config> steps[kSteps];
    bool any[kTileSlots];  // whether a tile of keys has steps

    __device__ Sm90KeptStep<Config>& step(int32_t index) {
        return steps[static_cast<uint32_t>(index) % kSteps];
    }
    __device__ const Sm90KeptStep<Config>& step(int32_t index) const {
        return steps[static_cast<uint32_t>(index) % kSteps];
    }
};

// Where sums of dQ take their parts in order (turns.cuh): a phase for each step and warpgroup. It completes
// when the warpgroup may add its part, and when it has.
template <class Config, bool kUsed = Config::kOrdered>
struct Sm90TurnBarriers {
    __device__ void init() {}
};
template <class Config>
struct Sm90TurnBarriers<Config, true> {
    uint64_t come[Config::kConsumers], added[Config::kConsumers];

    __device__ void init() {
        for (int group = 0; group < Config::kConsumers; ++group) {
            ptx::mbarrier_init(&come[group], 1);
            ptx::mbarrier_init(&added[group], 4);
        }
    }
};

// What a warp that converts sums of dQ works in (finished_sums.cuh): those of 16 queries in pieces of 16
// bytes a lane, twice, since the next ones come meanwhile.
template <class Config, bool kUsed = Config::kBeside>
struct Sm90SumsRooms {
    struct Room {};
    __device__ void init() {}
};
template <class Config>
struct Sm90SumsRooms<Config, true> {
    struct Room {
        alignas(128) float4 sums[2][Config::kDqColumns / 8][32];
        alignas(16) uint16_t rows[16 * kConvertedStride<Config>];
        uint64_t full[2];
    };
    Room of_warp[2];

    __device__ void init() {
        for (Room& room : of_warp) {
            for (uint64_t& full : room.full) ptx::mbarrier_init(&full, 1);
        }
    }
};

// The parity of a step's phase.
__device__ __forceinline__ uint32_t turn_parity(int32_t step) { return static_cast<uint32_t>(step) % 2; }

// What the CTAs of a cluster know of each other's keys.
template <class Config, bool kUsed = (Config::kCtas > 1)>
struct Sm90ClusterKeys {};
template <class Config>
struct Sm90ClusterKeys<Config, true> {
    int32_t cluster_keys = 0;  // of both CTAs, of which the second may have none
};

// A tile of keys, and the tiles of queries that the CTA walks for it, one head of the group after the other;
// where a mask hides blocks, it walks some of the parts of kPartQueries, and tiles are these. A warp
// computes these facts while the CTA works on the tile before, and others read them from shared memory.
template <class Config>
struct Sm90BackwardWork : Sm90ClusterKeys<Config> {
    struct Sequence {
        int32_t seqlen_q;
        Visibility see;
        __device__ int32_t q_pos(int32_t query) const { return see.seqlen_k - seqlen_q + query; }
    };
    int32_t cta_tile;  // its place in plan.key_order, for each CTA of a cluster
    Sequence seq;
    int32_t batch;
    int32_t kv_head, group_size;
    int32_t first_key, num_keys;  // of the CTA
    int32_t q_begin, k_begin;     // packed: the sequence's first token; dense: 0
    int32_t first_tile, num_tiles, num_steps;
    int32_t whole_begin, whole_end;  // the tiles all of whose queries see all keys of the CTA
    int32_t workspace_tile;          // the tile of the sequence's first query
    bool rises;                      // with turns: whether TurnOrder's key tiles rise here
    static constexpr int kClusterKeys = Config::kKeys * Config::kCtas;

    // There are no keys past the last tile.
    __device__ Sm90BackwardWork(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan,
                                int32_t cta_tile)
        : cta_tile(cta_tile) {
        const int32_t index = cta_tile / Config::kCtas;
        const TileOrder::Place place = [&] {
            if constexpr (Config::kOrdered) {
                rises = plan.turn_order.rises(index);
                return plan.turn_order.of(index);
            } else {
                return plan.key_order.of(index);
            }
        }();
        const auto [tile, head] = find_head_tile<kClusterKeys>(place, p.cu_seqlens_k, p.batch);
        num_keys = 0;
        if (tile.batch < 0) return;
        batch = tile.batch;
        const SequenceSlice slice = SequenceSlice::make(p, batch);
        seq = {slice.seqlen_q, slice.see};
        kv_head = head;
        group_size = p.group_size();
        first_key = tile.index * kClusterKeys;
        num_keys = max(min(seq.see.seqlen_k - first_key, kClusterKeys), 0);
        if (num_keys == 0) return;
        q_begin = p.cu_seqlens_q ? p.cu_seqlens_q[batch] : 0;
        k_begin = p.cu_seqlens_k ? p.cu_seqlens_k[batch] : 0;
        const QueryRange queries(seq.see, seq.seqlen_q, first_key, first_key + num_keys);
        first_tile = queries.begin / Config::kPartQueries;
        num_tiles = (queries.end + Config::kPartQueries - 1) / Config::kPartQueries - first_tile;
        num_steps = queries.begin < queries.end ? group_size * num_tiles : 0;
        if constexpr (Config::kCtas > 1) {
            this->cluster_keys = num_keys;
            const int32_t before = cta_tile % Config::kCtas * Config::kKeys;
            first_key += before;
            num_keys = max(min(num_keys - before, Config::kKeys), 0);
        }
        const QueryRange whole =
            QueryRange::that_see_all(seq.see, seq.seqlen_q, first_key, first_key + Config::kKeys);
        whole_begin = (whole.begin + Config::kPartQueries - 1) / Config::kPartQueries;
        // Rows past the last query have no weight.
        whole_end =
            (whole.end + (whole.end == seq.seqlen_q ? Config::kPartQueries - 1 : 0)) / Config::kPartQueries;
        workspace_tile =
            first_workspace_row<Config::kQueries>(plan, p.cu_seqlens_q, batch) / Config::kPartQueries;
    }

    // The keys of the other CTA of a cluster of two.
    __device__ int32_t first_other_key() const { return first_key ^ Config::kKeys; }
    __device__ int32_t num_other_keys() const {
        if constexpr (Config::kCtas > 1) return this->cluster_keys - num_keys;
        return 0;
    }
};

template <class Config>
struct Sm90BackwardShared {
    static constexpr bool kPairs = Config::kCtas > 1;

    // Statistics come first, since compute-sanitizer believes that a product with terms reads twice the
    // bytes: its second eight columns are the first ones again.
    alignas(1024) typename Config::Lse lse[Config::kStages][Config::kQueries];
    alignas(1024) typename Config::Delta delta[Config::kStages][Config::kQueries];
    alignas(1024) BfloatTerms factors[Config::kKeys];  // what meets the terms of a query, for each key
    // In a cluster, `k` are own_keys() and other_keys().
    alignas(1024) unsigned char k[Config::kKeyTileBytes];                // with roles, dK at the end
    alignas(1024) unsigned char v[kPairs ? 16 : Config::kKeyTileBytes];  // with roles, dV at the end
    alignas(1024) unsigned char q[Config::kStages][Config::kQueryTileBytes];
    alignas(1024) unsigned char dout[Config::kStages][Config::kQueryTileBytes];
    // Slots of kDsTileBytes: in a cluster, dS of this CTA's keys and of the other's. If persistent, dV and
    // behind it dK lie here at the end of a tile of keys.
    alignas(1024) unsigned char ds[Config::kDsBytes];
    // With roles, weights on their way from one warpgroup to the other, as its lanes hold them.
    alignas(16) uint4
        weights[Config::kRoles ? Config::kWeightSlots : 1][Config::kRoles ? Config::kQueries / 16 * 128 : 1];
    // Which weights dropout leaves out: each key has a bit for each query.
    alignas(
        16) uint32_t dropped[Config::kDropout ? Config::kStages : 1][Config::kKeys][Config::kQueries / 32];
    // This tile of keys and the next one; cta_tile is negative behind the last tile of the CTA.
    Sm90BackwardWork<Config> tiles[kTileSlots];
    // A slot is full when the phase of its `full` barrier completes, and free again when that of its `empty`
    // one does. q_empty serves dout and dropped, too. gradients_* serve dK and dV on their way out.
    uint64_t tile_full[kTileSlots], tile_empty[kTileSlots], tile_wanted;
    uint64_t k_full, v_full, keys_empty, gradients_full, gradients_empty;
    uint64_t q_full[Config::kStages], dout_full[Config::kStages], q_empty[Config::kStages];
    uint64_t dropped_full[Config::kStages];
    uint64_t weights_full[Config::kWeightSlots], weights_empty[Config::kWeightSlots];
    uint64_t ds_full[Config::kDsSlots], ds_empty[Config::kDsSlots];
    Sm90KeptSteps<Config> kept;
    Sm90TurnBarriers<Config> turns;
    Sm90SumsRooms<Config> rooms;

    __device__ unsigned char* ds_slot(int slot) { return ds + slot * Config::kDsTileBytes; }
    // In a cluster: the columns of dQ that the CTA sums, of its own keys and of the other's.
    __device__ unsigned char* own_keys() { return k; }
    __device__ unsigned char* other_keys() { return k + Config::kOwnBlocks * Config::kKeyBlockBytes; }
    // From there K and V are read to registers.
    __device__ unsigned char* k_rows() { return dout[Config::kStages - 1]; }
    __device__ unsigned char* v_rows() { return q[Config::kStages - 1]; }
    __device__ unsigned char* dv_out() { return Config::kPersistent ? ds : kPairs ? q[0] : v; }
    __device__ unsigned char* dk_out() {
        return Config::kPersistent ? ds + Config::kKeyTileBytes : kPairs ? dout[0] : k;
    }

    // Columns 0 to 2 meet the number, and the next three the slope with ALiBi, whose factor is the key's
    // distance from the tile's first. A product reads the eight columns twice, so that they have half of
    // each.
    __device__ void write_factors() {
        if (threadIdx.x >= Config::kKeys) return;
        auto half = [](float factor) {  // exact in bfloat16
            return static_cast<uint16_t>(__float_as_uint(0.5f * factor) >> 16);
        };
        const uint16_t one = half(1.0f), distance = half(Config::kAlibi ? threadIdx.x : 0.0f);
        factors[threadIdx.x] = {{one, one, one, distance, distance, distance, 0, 0}};
        ptx::fence_proxy_async();
    }

    __device__ void init() {
        for (int i = 0; i < kTileSlots; ++i) {
            ptx::mbarrier_init(&tile_full[i], 1);
            // The warps of consumers, those that draw or keep turns, the loader and the scheduler arrive.
            ptx::mbarrier_init(&tile_empty[i], Config::kConsumerWarps +
                                                   (Config::kDropout ? Config::kDrawingWarps : 0) +
                                                   (Config::kOrdered ? Config::kConsumers : 0) + 2);
        }
        ptx::mbarrier_init(&tile_wanted, 1);
        ptx::mbarrier_init(&k_full, 1);
        ptx::mbarrier_init(&v_full, 1);
        ptx::mbarrier_init(&keys_empty, Config::kConsumerWarps);
        ptx::mbarrier_init(&gradients_full, Config::kConsumerWarps);
        ptx::mbarrier_init(&gradients_empty, 1);
        for (int i = 0; i < Config::kStages; ++i) {
            ptx::mbarrier_init(&q_full[i], 1);
            ptx::mbarrier_init(&dout_full[i], 1);
            ptx::mbarrier_init(&q_empty[i], Config::kConsumerWarps * Config::kCtas);
            ptx::mbarrier_init(&dropped_full[i], Config::kDrawingWarps);
            if (i >= Config::kWeightSlots) continue;
            ptx::mbarrier_init(&weights_full[i], 4);
            ptx::mbarrier_init(&weights_empty[i], 4);
        }
        for (int i = 0; i < Config::kDsSlots; ++i) {
            // In a cluster, one warpgroup of each CTA arrives.
            ptx::mbarrier_init(&ds_full[i], kPairs ? 4 : Config::kConsumerWarps);
            ptx::mbarrier_init(&ds_empty[i], kPairs ? 4 * Config::kCtas : Config::kConsumerWarps);
        }
        turns.init();
        rooms.init();
        ptx::mbarrier_init_fence();
    }
};

// Counts the tiles of keys that a CTA works through: `count` is the number of the tile under way.
struct Sm90TileCount {
    int32_t count = 0;

    __device__ int slot() const { return count % kTileSlots; }
    __device__ uint32_t slot_parity() const { return static_cast<uint32_t>(count) / kTileSlots % 2; }
    // The parity of barriers that have one phase for each tile.
    __device__ uint32_t parity() const { return static_cast<uint32_t>(count) % 2; }
};

// The steps of a tile of keys in order, without divisions. Their numbers go on from one tile to the next.
template <class Config>
class Sm90BackwardStep {
  public:
    int32_t index, end, head, tile;

    __device__ Sm90BackwardStep(const Sm90BackwardWork<Config>& work, int32_t begin)
        : index(begin),
          end(begin + work.num_steps),
          head(work.kv_head * work.group_size),
          tile(work.first_tile) {}

    __device__ bool is_left() const { return index < end; }
    __device__ int32_t left() const { return end - index; }
    __device__ void advance(const Sm90BackwardWork<Config>& work) {
        if (++tile == work.first_tile + work.num_tiles) {
            tile = work.first_tile;
            ++head;
        }
        ++index;
    }
    // The slot of its tiles, and the parity of the phase that fills it.
    __device__ uint32_t stage() const { return static_cast<uint32_t>(index) % Config::kStages; }
    __device__ uint32_t parity() const { return static_cast<uint32_t>(index) / Config::kStages % 2; }

    __device__ int32_t head_of(int) const { return head; }
    __device__ int32_t first_query(int) const { return tile * Config::kQueries; }
    __device__ bool keeps(int, int) const { return true; }
    __device__ bool kept_any_before(int) const { return true; }
    // The tile in workspace.
    __device__ int32_t place(const Sm90BackwardLaunch& plan, const Sm90BackwardWork<Config>& work,
                             int) const {
        return head * plan.num_tiles + work.workspace_tile + tile;
    }
    // Whether some query of the tile does not see some key of the CTA.
    __device__ bool is_masked(const Sm90BackwardWork<Config>& work, int) const {
        return tile < work.whole_begin || tile >= work.whole_end;
    }
};

// The steps where sums take their parts in order: where tiles of keys rise, a head's tiles of queries come
// from the last one on.
template <class Config>
class Sm90TurnStep : public Sm90BackwardStep<Config> {
  public:
    using Sm90BackwardStep<Config>::index, Sm90BackwardStep<Config>::head, Sm90BackwardStep<Config>::tile;

    __device__ Sm90TurnStep(const Sm90BackwardWork<Config>& work, int32_t begin)
        : Sm90BackwardStep<Config>(work, begin) {
        if (work.rises) tile = last_tile(work);
    }
    __device__ void advance(const Sm90BackwardWork<Config>& work) {
        const bool is_last = tile == (work.rises ? work.first_tile : last_tile(work));
        if (is_last) {
            tile = work.rises ? last_tile(work) : work.first_tile;
            ++head;
        } else {
            tile += work.rises ? -1 : 1;
        }
        ++index;
    }

  private:
    __device__ static int32_t last_tile(const Sm90BackwardWork<Config>& work) {
        return work.first_tile + work.num_tiles - 1;
    }
};

}  // namespace octavo::cuda
