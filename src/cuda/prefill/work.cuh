// Which row tile a CTA works on next.
#pragma once

#include "cuda/prefill/config.h"
#include "cuda/ptx/cluster.h"
#include "cuda/warp.cuh"

namespace octavo::cuda {

// One row tile: `first_head` to first_head + plan.heads, from query `first_token` of its sequence on.
struct alignas(16) PrefillWork {
    int32_t batch;  // -1: no more work
    int32_t first_head;
    int32_t first_token;
    int32_t seqlen_q;
    int32_t seqlen_k;
    int32_t prefix_len;
    int32_t q_begin;  // packed arrays: the sequence's first token
    int32_t k_begin;

    __device__ Visibility visibility(const ForwardParams& p) const {
        return {seqlen_k, prefix_len, p.window_left, p.window_right};
    }
    __device__ PrefillWork from_lane_0() const {
        auto get = [](int32_t x) { return __shfl_sync(~0u, x, 0); };
        return {get(batch),    get(first_head), get(first_token), get(seqlen_q),
                get(seqlen_k), get(prefix_len), get(q_begin),     get(k_begin)};
    }
    __device__ int32_t q_pos(int32_t token) const { return seqlen_k - seqlen_q + token; }
};

// Which 64 rows of a row tile are those of warpgroup `group` of this CTA. The CTAs of a pair take them by
// turns, so that under a causal mask neither has all of the long ones.
template <class Config>
__device__ __forceinline__ int tile_block(int group) {
    return Config::kCtas == 1 ? group : 2 * group + (static_cast<int>(ptx::cluster_rank()) ^ (group & 1));
}

// Hands out the row tiles of the launch, in order, to whichever cluster asks next. One warp of each cluster
// uses it, all lanes together.
template <class Config>
class PrefillScheduler {
  public:
    __device__ PrefillScheduler(const ForwardParams& p, const PrefillPlan& plan)
        : p_(p),
          plan_(plan),
          tile_tokens_(Config::kTileBlocks * plan.tokens),
          index_(blockIdx.x / Config::kCtas) {}

    // The row tile at hand.
    __device__ PrefillWork work() {
        PrefillWork w{};
        const int32_t num_units_a_sequence = p_.num_q_heads / plan_.heads;
        if (p_.cu_seqlens_q) {
            find_sequence(num_units_a_sequence);
            w.batch = batch_;
            if (batch_ < 0) return w;
            const int32_t row_tiles = sequence_tiles_ / num_units_a_sequence;
            const int32_t at = index_ - before_;
            w.first_head = at % num_units_a_sequence * plan_.heads;
            w.first_token = (row_tiles - 1 - at / num_units_a_sequence) * tile_tokens_;
            w.q_begin = p_.cu_seqlens_q[batch_];
            w.seqlen_q = p_.cu_seqlens_q[batch_ + 1] - w.q_begin;
        } else {
            if (index_ >= plan_.num_row_tiles * plan_.num_units) {
                end_ = plan_.num_row_tiles * plan_.num_units;
                w.batch = -1;
                return w;
            }
            int32_t first_unit = 0, units = plan_.first_section, at = index_;
            if (at >= units * plan_.num_row_tiles) {
                at -= units * plan_.num_row_tiles;
                const int32_t section = at / (plan_.section * plan_.num_row_tiles);
                at -= section * plan_.section * plan_.num_row_tiles;
                first_unit = units + section * plan_.section;
                units = plan_.section;
            }
            const int32_t unit = first_unit + at % units;
            w.batch = unit / num_units_a_sequence;
            w.first_head = unit % num_units_a_sequence * plan_.heads;
            w.first_token = (plan_.num_row_tiles - 1 - at / units) * tile_tokens_;
            w.seqlen_q = p_.seqlen_q;
        }
        w.seqlen_k = SequenceSlice::seqlen_k(p_, w.batch);
        if (p_.cu_seqlens_k) w.k_begin = p_.cu_seqlens_k[w.batch];
        w.prefix_len = SequenceSlice::prefix_len(p_, w.batch, w.seqlen_k);
        return w;
    }

    // Asks for another row tile, which `advance` makes the one at hand.
    __device__ void request() {
        if (threadIdx.x % 32 == 0) drawn_ = atomicAdd(plan_.counter, 1);
    }
    __device__ void advance() { index_ = num_clusters() + __shfl_sync(~0u, drawn_, 0); }

    // Once there is no more work: every cluster that had any draws one number past the end, so that as many
    // are drawn as there are row tiles; the last to draw puts the counter back.
    __device__ void finish() {
        const int32_t drawn = index_ - num_clusters();
        if (drawn >= 0 && drawn == end_ - 1 && threadIdx.x % 32 == 0) *plan_.counter = 0;
    }

  private:
    __device__ int32_t num_clusters() const { return static_cast<int32_t>(gridDim.x) / Config::kCtas; }

    // Moves on to the sequence that holds row tile `index_`; -1 past the last.
    __device__ void find_sequence(int32_t num_units_a_sequence) {
        if (batch_ >= 0 && index_ < before_ + sequence_tiles_) return;
        const int32_t lane = threadIdx.x % 32;
        before_ += sequence_tiles_;
        for (int32_t base = batch_ + 1; base < p_.batch; base += 32) {
            const int32_t b = base + lane;
            int32_t tiles = 0;
            if (b < p_.batch) {
                const int32_t length = p_.cu_seqlens_q[b + 1] - p_.cu_seqlens_q[b];
                tiles = (length + tile_tokens_ - 1) / tile_tokens_ * num_units_a_sequence;
            }
            const int32_t end = inclusive_sum(tiles);
            const uint32_t past = __ballot_sync(~0u, index_ < before_ + end);
            if (past) {
                const int32_t owner = __ffs(past) - 1;
                batch_ = base + owner;
                sequence_tiles_ = __shfl_sync(~0u, tiles, owner);
                before_ += __shfl_sync(~0u, end - tiles, owner);
                return;
            }
            before_ += __shfl_sync(~0u, end, 31);
        }
        batch_ = -1;
        end_ = before_;
    }

    const ForwardParams& p_;
    const PrefillPlan& plan_;
    const int32_t tile_tokens_;
    int32_t index_;
    int32_t drawn_ = 0;
    int32_t end_ = 0;  // row tiles in all, once known
    // Packed queries: the sequence at hand, its row tiles over all heads, and those before it.
    int32_t batch_ = -1, sequence_tiles_ = 0, before_ = 0;
};

}  // namespace octavo::cuda
