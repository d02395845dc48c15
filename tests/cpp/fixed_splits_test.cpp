// How items are cut where their bits must not depend on the batch: arithmetic that host and device share.
#include "cuda/decode/fixed_splits.h"
#include "cuda/decode/tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>
#include <vector>

namespace octavo::cuda {
namespace {

// Numbers of blocks that an item may have.
std::vector<int32_t> some_blocks() {
    std::vector<int32_t> blocks;
    for (int32_t count = 1; count <= 3000; ++count) blocks.push_back(count);
    for (int32_t count : {4095, 4096, 4097, 100003, (1 << 26) - 1, 1 << 26}) blocks.push_back(count);
    return blocks;
}

// Every block belongs to the share of one warp, in order, and no warp has much more than another one.
template <class Config>
void expect_whole(const FixedSplitCut<Config>& cut) {
    const int32_t shares = cut.num_splits() * Config::kWarps;
    int32_t position = 0;
    for (int32_t split = 0; split < cut.num_splits(); ++split) {
        for (int32_t warp = 0; warp < Config::kWarps; ++warp) {
            const int32_t begin = cut.share_begin(split, warp), end = cut.share_begin(split, warp + 1);
            ASSERT_EQ(begin, position) << "split " << split << ", warp " << warp;
            ASSERT_LE(end - begin, (cut.shared_blocks + shares - 1) / shares);
            if (warp >= cut.num_warps) {
                ASSERT_EQ(begin, end) << "warp " << warp << " has blocks and is left out";
            }
            position = end;
        }
        ASSERT_TRUE(split == 0 || cut.share_begin(split, 0) < position) << "an empty split";
    }
    ASSERT_EQ(position, cut.blocks);
}

template <class Config>
void expect_fixed() {
    for (int32_t max_log2 = 0; max_log2 <= 5; ++max_log2) {
        const FixedSplits<Config> splits(max_log2);
        int32_t most_so_far = 1;
        for (const int32_t blocks : some_blocks()) {
            SCOPED_TRACE("head_dim " + std::to_string(Config::kHeadDim) + ", " + std::to_string(blocks) +
                         " blocks, up to " + std::to_string(1 << max_log2) + " splits");
            const FixedSplitCut<Config> cut = splits.cut(blocks);
            ASSERT_EQ(cut.blocks, blocks);
            ASSERT_LE(cut.num_splits(), 1 << max_log2);
            ASSERT_LE(cut.splits_of_subtotal(), cut.num_splits());
            // Subtotals are no more than warps, as the comment in the header promises, where there are any.
            if (cut.splits_of_subtotal() > 1) {
                ASSERT_LE(cut.num_splits() / cut.splits_of_subtotal(), Config::kWarps);
            }
            // What the grid has room for does not bound what the item's own length asks for.
            most_so_far = std::max(most_so_far, cut.num_splits());
            ASSERT_EQ(splits.most(blocks), most_so_far)
                << "of the longest item that has up to this many blocks";
            expect_whole(cut);
            if (::testing::Test::HasFatalFailure()) return;
        }
        ASSERT_EQ(most_so_far, 1 << max_log2) << "no item has as many splits as one may have";
    }
}

// The configuration of a row of kDecodeTiles.
template <size_t kRow, int kCtas, Codes kCodes>
using FixedItemsOf = FixedItems<kDecodeTiles[kRow].head_dim, kDecodeTiles[kRow].row_tiles, kCtas, kCodes>;

template <size_t... kRows>
void expect_fixed_of_rows(std::index_sequence<kRows...>) {
    (expect_fixed<FixedItemsOf<kRows, 1, Codes::none>>(), ...);
    (expect_fixed<FixedItemsOf<kRows, 1, Codes::int8>>(), ...);
}

TEST(FixedSplits, ShareOutEveryBlockOnce) {
    expect_fixed_of_rows(std::make_index_sequence<std::size(kDecodeTiles)>());
}

// Both configurations that serve fixed splits cut an item alike: which of them runs depends on the batch.
template <class One, class Other>
void expect_alike() {
    ASSERT_EQ(One::kWarps, Other::kWarps);
    for (const int32_t blocks : some_blocks()) {
        const FixedSplitCut<One> one = FixedSplits<One>(5).cut(blocks);
        const FixedSplitCut<Other> other = FixedSplits<Other>(5).cut(blocks);
        ASSERT_EQ(one.num_splits(), other.num_splits()) << blocks;
        ASSERT_EQ(one.splits_of_subtotal(), other.splits_of_subtotal()) << blocks;
        ASSERT_EQ(one.shared_blocks, other.shared_blocks) << blocks;
        ASSERT_EQ(one.num_warps, other.num_warps) << blocks;
    }
}

template <size_t... kRows>
void expect_alike_of_rows(std::index_sequence<kRows...>) {
    (expect_alike<FixedItemsOf<kRows, 1, Codes::none>, FixedItemsOf<kRows, 2, Codes::none>>(), ...);
    static_assert(
        (std::is_same_v<FixedItemsOf<kRows, 1, Codes::int4>, FixedItemsOf<kRows, 2, Codes::int4>> && ...));
}

TEST(FixedSplits, DoNotDependOnTheConfiguration) {
    expect_alike_of_rows(std::make_index_sequence<std::size(kDecodeTiles)>());
}

// One sequence fills a device of some 128 SMs, if its heads allow.
TEST(FixedSplits, AreBoundedByTheHeads) {
    using Splits = FixedSplits<FixedItems<128, 1, 1, Codes::none>>;
    EXPECT_EQ(Splits::max_log2(1), 5);
    EXPECT_EQ(Splits::max_log2(4), 5);
    EXPECT_EQ(Splits::max_log2(8), 4);
    EXPECT_EQ(Splits::max_log2(100), 0);
    EXPECT_EQ(Splits::max_log2(1000), 0);
}

}  // namespace
}  // namespace octavo::cuda
