// What a CTA of the decode kernels is made of, for each head dim and number of rows.
#pragma once

#include "common/macros.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace octavo::cuda {

constexpr int kBlockKeys = 16;         // what a warp works on at once: the depth of one product with V
constexpr int kMaxDecodeCtas = 256;    // of the stream-K kernel, one an SM
constexpr int kMaxDecodeBatch = 1024;  // its schedule keeps a number for each sequence in shared memory
// A CTA of either kernel takes up to this much shared memory: what Hopper and its successors have.
constexpr size_t kDecodeSharedBytes = 227 * 1024;

// One row of the table: what has kernels of its own. CMake compiles the rows of this table.
struct DecodeTiles {
    int head_dim;
    int row_tiles;  // of eight rows; a row is one query token of one query head

    constexpr int rows() const { return 8 * row_tiles; }
};

constexpr DecodeTiles kDecodeTiles[] = {
    {64, 1},   //
    {64, 2},   //
    {96, 1},   //
    {96, 2},   //
    {128, 1},  //
    {128, 2},  //
    {192, 1},  //
    {256, 1},
};

// kPieces: of items, that a warp sets aside.
template <int kHeadDim_, int kRowTiles_, int kWarps_ = (kRowTiles_ == 1 && kHeadDim_ <= 128 ? 8 : 4),
          int kPieces_ = kRowTiles_>
struct DecodeConfig {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kRowTiles = kRowTiles_;  // of eight rows: (query token, head of the group)
    static constexpr int kRows = 8 * kRowTiles;
    static constexpr int kWarps = kWarps_;
    static constexpr int kThreads = 32 * kWarps;
    // 16-byte chunks of a row's place in shared memory (whole 128 bytes, for the swizzle), of a block's keys
    // and values, and of an item's queries with the slopes of their heads.
    static constexpr int kRowChunks = (kHeadDim + 63) / 64 * 8;
    static constexpr int kBlockChunks = 2 * kBlockKeys * kRowChunks;
    static constexpr int kQueryChunks = kRows * kRowChunks + 8;
    // A row of partial results: weighted sums of values, their maximum, the sum of the weights, padding.
    static constexpr int kWarpPartialRow = kHeadDim + 4;
    // Blocks that a warp has on their way: up to 144 KB an SM, three times what HBM's latency asks for, and
    // what fits beside the queries of as many items and the pieces of items.
    static constexpr int kPieceBytes = kRows * (kWarpPartialRow + 2) * 4;
    static constexpr int kStages =
        std::min(144 * 1024 / (16 * kWarps * kBlockChunks),
                 (219 * 1024 / kWarps - kPieces_ * kPieceBytes) / (16 * (kBlockChunks + kQueryChunks)));
    // A CTA's share is about so many blocks at least, 64 KB a tile of rows: smaller ones would cost more
    // merging than they save.
    static constexpr int kMinBlocks = std::max(kRowTiles * 64 * 1024 / (16 * kBlockChunks), kWarps);
    // A CTA's share may grow or shrink by as many blocks to end where an item ends: some 32 KB, what an SM
    // reads in the time of a merge.
    static constexpr int kSnapBlocks = 32 * 1024 / (kBlockChunks * 16);
};

// Of the kernel that serves any batch. Two tiles of rows take a warp so long that four of them do not draw an
// SM's share of the bandwidth.
template <int kHeadDim, int kRowTiles>
using StreamKConfig =
    DecodeConfig<kHeadDim, kRowTiles, kRowTiles == 2 ? 6 : DecodeConfig<kHeadDim, kRowTiles>::kWarps, 1>;

// Who works on an item.
enum class SplitPolicy {
    even,       // equally many CTAs on each
    by_length,  // more on longer ones, of a batch whose lengths a warp knows
    fixed,      // one on a unit (units.cuh): batch-invariant
};
constexpr int kMaxSequencesByLength = 32;

// kCtas: of an SM. One, with the deeper queues, where a CTA has much to read: with room for a second one, the
// next launch's CTAs went two to some SMs and none to others. Two or more, where CTAs have little.
template <int kHeadDim, int kRowTiles, int kCtas_, int kWarps = DecodeConfig<kHeadDim, kRowTiles>::kWarps>
struct SplitKvConfig : DecodeConfig<kHeadDim, kRowTiles, kWarps> {
    using Base = DecodeConfig<kHeadDim, kRowTiles, kWarps>;
    static constexpr int kCtas = kCtas_;
    static constexpr int kTileChunks = Base::kBlockChunks / 2;  // of a block's keys, or of its values
    // Tiles that a warp has room for, an odd number: one in use and the others on their way.
    static constexpr int kRoomBytes = 226 / kCtas * 1024 - 16 * Base::kQueryChunks;
    static constexpr int kTiles = (kRoomBytes / (16 * Base::kWarps * kTileChunks) - 1) / 2 * 2 + 1;
    static_assert(kTiles >= 3);
    // A row that a CTA hands to the mergers: its dims, then maximum and sum for each warp that may read them.
    static constexpr int kPartialRow = kHeadDim + 2 * Base::kWarps;
    // Items of so many keys are short: two blocks a warp.
    static constexpr int kShortKeys = 2 * Base::kWarps * kBlockKeys;
    // Blocks of a part: a warp has one, and all have 64 KB or little less. Twice as many take less time than
    // to merge two parts.
    static constexpr int kPartBlocks = std::max(64 * 1024 / (16 * Base::kBlockChunks), Base::kWarps);
    OCTAVO_HD static int32_t parts_of(int32_t blocks) {
        return blocks <= 2 * kPartBlocks ? 1 : (blocks + kPartBlocks - 1) / kPartBlocks;
    }
};

template <int kHeadDim, int kRowTiles>
using ShortConfig = SplitKvConfig<kHeadDim, kRowTiles, 2>;

// Of many items, a CTA each: smaller CTAs, as many an SM as registers allow, so that some read while others
// start or end.
template <int kHeadDim, int kRowTiles>
using ManyConfig = SplitKvConfig<kHeadDim, kRowTiles, (kHeadDim > 128 ? 2 : (kRowTiles == 1 ? 4 : 3)), 4>;

// Whether short items have a configuration of their own under SplitPolicy::even; otherwise that of many items
// serves them.
template <int kHeadDim, int kRowTiles>
constexpr bool has_short_items() {
    return ManyConfig<kHeadDim, kRowTiles>::kWarps != DecodeConfig<kHeadDim, kRowTiles>::kWarps;
}

// By length: as many warps as one tile of rows has.
template <int kHeadDim, int kRowTiles>
using ByLengthConfig = SplitKvConfig<kHeadDim, kRowTiles, 1, kHeadDim <= 128 ? 8 : 4>;

}  // namespace octavo::cuda
