// Batch-invariant splits: into how many an item is cut, which follows from its number of blocks and from the
// number of KV heads alone. Where it is cut: units.cuh, where a split is called a unit.
#pragma once

#include <algorithm>
#include <cstdint>

namespace octavo::cuda {

template <class Config>
class FixedSplits {
  public:
    // Long items have so many splits that one sequence fills the device, if its heads allow.
    static constexpr int kMaxSplits = 32, kMaxSplitsOfSequence = 128;
    // Items of up to kShortBlocks have one split. Of a few splits each has as many at least, of more splits
    // twice as many.
    static constexpr int kShortBlocks = 16, kLongBlocks = 2 * kShortBlocks;

    // The most splits of an item, as a power of two, for a number of KV heads.
    static int32_t max_log2(int32_t num_kv_heads) {
        return log2(std::clamp(kMaxSplitsOfSequence / num_kv_heads, 1, kMaxSplits));
    }

    explicit FixedSplits(int32_t max_log2) : max_log2_(max_log2) {}

    // The splits of the longest item that has up to `blocks`.
    int32_t most(int64_t blocks) const {
        constexpr int64_t kMany = int64_t{kMaxSplits} * kLongBlocks;
        if (blocks <= kShortBlocks) return 1;
        const int32_t blocks_log2 = log2(static_cast<int32_t>(std::min(blocks, kMany)));
        const int32_t few = std::min(blocks_log2 - log2(kShortBlocks), kFewLog2);
        return 1 << std::min(std::max(few, blocks_log2 - log2(kLongBlocks)), max_log2_);
    }

  private:
    // Splits that may be as short as a short item. With more dims, adding them up costs more than it saves.
    static constexpr int kFewLog2 = Config::kHeadDim <= 128 ? 2 : 0;

    static constexpr int32_t log2(int32_t x) { return x < 2 ? 0 : 1 + log2(x / 2); }

    int32_t max_log2_;
};

}  // namespace octavo::cuda
