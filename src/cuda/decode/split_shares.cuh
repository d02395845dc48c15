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

// For SplitPolicy::by_length: a KV head has a number of slots, each of them a CTA. Every sequence gets as
// many as it can use, or, where these are not enough, equally many if all are alike, or else as many as give
// all splits about one size. Every warp computes this by itself.
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
        int32_t num_splits =
            has_sequence ? min(launch.num_splits, Config::splits_of(static_cast<int32_t>(blocks))) : 0;
        const uint32_t first_blocks = __shfl_sync(~0u, blocks, 0);
        if (__all_sync(~0u, !has_sequence || blocks == first_blocks)) {
            num_splits = min(num_splits, launch.equal_splits);
        } else if (__reduce_add_sync(~0u, num_splits) > launch.num_slots) {
            num_splits = splits_of_one_size(blocks, num_splits, p.batch, launch.num_slots);
        }
        return {lane, length, inclusive_sum(num_splits) - num_splits, num_splits};
    }

    // How many splits a sequence of `blocks` blocks has, `most` at most, if all splits have about one size:
    // one of the smallest for which the slots suffice, found by halving four times. They certainly suffice
    // for the first: each sequence then has less than one split more than its length would take exactly, or
    // one.
    __device__ static int32_t splits_of_one_size(uint32_t blocks, int32_t most, int32_t batch,
                                                 int32_t num_slots) {
        auto splits = [&](float splits_of_block) {
            const float exact = static_cast<float>(blocks) * splits_of_block;
            return min(max(static_cast<int32_t>(ceilf(exact)), 1), most);  // most is 0 without a sequence
        };
        const auto sum = static_cast<float>(__reduce_add_sync(~0u, blocks));
        float too_small = sum / static_cast<float>(num_slots);
        float size = min(1.001f * sum / static_cast<float>(num_slots - batch), sum);
        int32_t num_splits = splits(1 / size);
#pragma unroll
        for (int halvings = 0; halvings < 4; ++halvings) {
            const float middle = (too_small + size) / 2;
            const int32_t tried = splits(1 / middle);
            const bool suffices = __reduce_add_sync(~0u, tried) <= num_slots;
            (suffices ? size : too_small) = middle;
            if (suffices) num_splits = tried;
        }
        return num_splits;
    }

    __device__ LengthShare from(int lane) const {
        return {lane, __shfl_sync(~0u, length, lane), __shfl_sync(~0u, first, lane),
                __shfl_sync(~0u, num_splits, lane)};
    }
};

}  // namespace octavo::cuda
