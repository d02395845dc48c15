// Which blocks a CTA of the split-KV kernel works on, for the policies whose rule is not simply turns.
#pragma once

#include "cuda/decode/fixed_splits.h"
#include "cuda/decode/parameters.h"
#include "cuda/ptx/relaxed.h"
#include "cuda/warp.cuh"
#include "params/attention_params.h"

namespace octavo::cuda {

// For SplitPolicy::fixed (batch-invariant): a warp's share of a split, and how the item is cut.
struct FixedShare {
    int32_t first = 0, end = 0;  // blocks
    int32_t num_warps = 0;       // warps that have blocks of the split
    int32_t num_splits = 0, splits_of_subtotal = 1;

    template <class Config>
    __device__ static FixedShare of(const FixedSplits<Config>& splits, int32_t num_blocks, int32_t split,
                                    int warp) {
        const FixedSplitCut<Config> cut = splits.cut(num_blocks);
        FixedShare own{cut.share_begin(split, warp), cut.share_begin(split, warp + 1), cut.num_warps,
                       cut.num_splits(), cut.splits_of_subtotal()};
        pin_in_register(own.first);
        pin_in_register(own.end);
        pin_in_register(own.num_warps);
        pin_in_register(own.num_splits);
        pin_in_register(own.splits_of_subtotal);
        return own;
    }
};

// For SplitPolicy::by_length: a KV head has a number of slots, each of them a CTA. Every sequence gets one
// slot, and of the remaining ones at most a number in proportion to its length. Every warp computes this by
// itself.
struct LengthShare {
    int32_t sequence, length;   // length: the value in seq_lens
    int32_t first, num_splits;  // the sequence's first slot, and how many it has

    template <class Config>
    __device__ static LengthShare of_slot(const AttentionParams& p, const SplitKvLaunch& launch,
                                          int32_t slot) {
        const LengthShare own = of_lane<Config>(p, launch);
        return own.from(__popc(__ballot_sync(~0u, own.first + own.num_splits <= slot)));
    }
    template <class Config>
    __device__ static LengthShare of_sequence(const AttentionParams& p, const SplitKvLaunch& launch,
                                              int32_t sequence) {
        return of_lane<Config>(p, launch).from(sequence);
    }

  private:
    template <class Config>
    __device__ static LengthShare of_lane(const AttentionParams& p, const SplitKvLaunch& launch) {
        const int32_t lane = threadIdx.x % 32;
        const bool has_sequence = lane < p.batch;
        const int32_t length = has_sequence ? ptx::load_relaxed(p.seq_lens.at(lane)) : 0;
        const int32_t seqlen_k = max(min(length - p.num_skipped_keys, p.seqlen_k), 0);
        const uint32_t all_blocks =
            (static_cast<uint32_t>(seqlen_k) + (Config::kBlockKeys - 1)) / Config::kBlockKeys;
        const uint32_t blocks = min(all_blocks, launch.max_visible_blocks);
        const uint32_t left = launch.num_slots - p.batch, sum = max(__reduce_add_sync(~0u, blocks), 1u);
        const int32_t deserved = 1 + static_cast<int32_t>(blocks * left / sum);
        const int32_t most = min(launch.num_splits, Config::splits_of(static_cast<int32_t>(blocks)));
        const int32_t num_splits = has_sequence ? min(deserved, most) : 0;
        return {lane, length, inclusive_sum(num_splits) - num_splits, num_splits};
    }
    __device__ LengthShare from(int lane) const {
        return {lane, __shfl_sync(~0u, length, lane), __shfl_sync(~0u, first, lane),
                __shfl_sync(~0u, num_splits, lane)};
    }
};

}  // namespace octavo::cuda
