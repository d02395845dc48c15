// Batch-invariant splits: how the blocks of an item are cut where the result's bits must not depend on the
// batch. The cuts follow from the item's number of blocks (and the number of KV heads) alone.
//
//     blocks     |0 1 2 3 ...                                     |
//     splits     |     0     |     1     |     2     |     3     |    a power of two, one CTA each
//     warps      | | | | | | |                                        equal shares of a split, kWarps of them
//
// The warps' shares differ by one block at most: share j, counted over all splits, begins with block j *
// blocks / shares. The shares of a split are combined from the left, then the splits: first those of each
// subtotal, then the subtotals. An item has no more subtotals than a CTA has warps.
#pragma once

#include "common/macros.h"

#include <algorithm>
#include <cstdint>

namespace octavo::cuda {

constexpr int32_t constant_log2(int32_t x) { return x < 2 ? 0 : 1 + constant_log2(x / 2); }

OCTAVO_HD int32_t floor_log2(int32_t x) {
#ifdef __CUDA_ARCH__
    return 31 - __clz(x);
#else
    return constant_log2(x);
#endif
}

// How one item is cut.
template <class Config>
struct FixedSplitCut {
    static constexpr int kWarpsLog2 = constant_log2(Config::kWarps);

    int32_t blocks;         // blocks of the item
    int32_t shared_blocks;  // the number that is cut into equal shares: `blocks`, or more where these are few
    int32_t splits_log2;
    int32_t subtotal_log2;  // splits in a subtotal, as a power of two
    int32_t num_warps;      // warps that have blocks of the first split

    OCTAVO_HD int32_t num_splits() const { return 1 << splits_log2; }
    OCTAVO_HD int32_t splits_of_subtotal() const { return 1 << subtotal_log2; }
    // The first block of a warp's share of a split. For a warp past the last one, it is the split's end.
    OCTAVO_HD int32_t share_begin(int32_t split, int32_t warp) const {
        const int64_t share = (split << kWarpsLog2) + warp;
        const auto begin =
            static_cast<int32_t>(static_cast<uint64_t>(share) * shared_blocks >> (splits_log2 + kWarpsLog2));
        return begin < blocks ? begin : blocks;
    }
};

template <class Config>
class FixedSplits {
  public:
    // Long items have enough splits for one sequence to fill the device, if its heads allow.
    static constexpr int kMaxSplits = 32, kMaxSplitsOfSequence = 128;
    // Items of up to kShortBlocks have one split. While an item has few splits, each has at least this many
    // blocks; beyond that, each has at least twice as many.
    static constexpr int kShortLog2 = 4, kShortBlocks = 1 << kShortLog2, kLongLog2 = kShortLog2 + 1;

    // The most splits of an item, as a power of two, for a number of KV heads.
    static int32_t max_log2(int32_t num_kv_heads) {
        return floor_log2(std::clamp(kMaxSplitsOfSequence / num_kv_heads, 1, kMaxSplits));
    }

    OCTAVO_HD explicit FixedSplits(int32_t max_log2) : max_log2_(max_log2) {}

    // The most splits that an item of up to `blocks` blocks has.
    int32_t most(int64_t blocks) const {
        constexpr int64_t kMany = int64_t{kMaxSplits} << kLongLog2;
        const auto count = static_cast<int32_t>(std::min(blocks, kMany));
        return 1 << splits_log2(count, floor_log2(count));
    }

    OCTAVO_HD FixedSplitCut<Config> cut(int32_t blocks) const {
        const int32_t shared_blocks = blocks > kMinBlocks ? blocks : kMinBlocks;
        const int32_t splits = splits_log2(blocks, floor_log2(shared_blocks));
        const int32_t subtotal = kFewLog2 > 0 ? splits - kWarpsLog2 : 0;
        const int32_t shares = (blocks + kMinShare - 1) >> kMinShareLog2;
        return {blocks, shared_blocks, splits, subtotal > 0 ? subtotal : 0,
                shares < Config::kWarps ? shares : Config::kWarps};
    }

  private:
    static constexpr int kWarpsLog2 = FixedSplitCut<Config>::kWarpsLog2;
    // The least number of blocks in a warp's share, so that its partial result is small beside its keys and
    // values.
    static constexpr int kMinShareLog2 = Config::kWarps == 8 ? 0 : 2, kMinShare = 1 << kMinShareLog2;
    static constexpr int kMinBlocks = Config::kWarps * kMinShare;
    // How many splits, as a power of two, may be as short as a short item. With more dims, combining them
    // costs more than they save.
    static constexpr int kFewLog2 = Config::kHeadDim <= 128 ? 2 : 0;

    OCTAVO_HD int32_t splits_log2(int32_t blocks, int32_t blocks_log2) const {
        if (blocks <= kShortBlocks) return 0;
        const int32_t short_splits = blocks_log2 - kShortLog2;
        const int32_t few = short_splits < kFewLog2 ? short_splits : kFewLog2;
        const int32_t many = blocks_log2 - kLongLog2;
        const int32_t splits = few > many ? few : many;
        return splits < max_log2_ ? splits : max_log2_;
    }

    int32_t max_log2_;
};

}  // namespace octavo::cuda
