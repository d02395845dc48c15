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

constexpr int decode_warps(int head_dim, int row_tiles) { return row_tiles == 1 && head_dim <= 128 ? 8 : 4; }

// What both kernels share.
template <int kHeadDim_, int kRowTiles_, int kWarps_>
struct DecodeConfig {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kRowTiles = kRowTiles_;
    static constexpr int kRows = 8 * kRowTiles;
    static constexpr int kWarps = kWarps_;
    static constexpr int kThreads = 32 * kWarps;
    // 16-byte chunks of a row's place in shared memory (whole 128 bytes, for the swizzle), of a block's keys
    // and values, and of an item's queries with the slopes of their heads.
    static constexpr int kRowChunks = (kHeadDim + 63) / 64 * 8;
    static constexpr int kBlockChunks = 2 * kBlockKeys * kRowChunks;
    static constexpr int kQueryChunks = kRows * kRowChunks + 8;
    static constexpr int kBlockBytes = 16 * kBlockChunks;
    // A row of a warp's partial result in shared memory, in floats: the dims, padded against bank conflicts.
    static constexpr int kWarpPartialRow = kHeadDim + 4;
    // A row of a CTA's partial result in the workspace, in words: the dims, then the softmax state, a copy
    // for each warp that may read it.
    static constexpr int kPartialRow = kHeadDim + 2 * kWarps;
};

// Of the kernel whose CTAs share out the work themselves, one CTA an SM. Two tiles of rows take a warp so
// long that four of them do not draw an SM's share of the bandwidth.
template <int kHeadDim, int kRowTiles>
struct StreamKConfig
    : DecodeConfig<kHeadDim, kRowTiles, kRowTiles == 2 ? 6 : decode_warps(kHeadDim, kRowTiles)> {
    using Base = DecodeConfig<kHeadDim, kRowTiles, kRowTiles == 2 ? 6 : decode_warps(kHeadDim, kRowTiles)>;
    // Blocks that a warp has on their way: up to 144 KB an SM, three times what HBM's latency asks for, and
    // what fits beside the queries of as many items and a partial result.
    static constexpr int kWarpPartialBytes = Base::kRows * (Base::kWarpPartialRow + 2) * 4;
    static constexpr int kStages = std::min(
        144 * 1024 / (Base::kWarps * Base::kBlockBytes),
        (219 * 1024 / Base::kWarps - kWarpPartialBytes) / (16 * (Base::kBlockChunks + Base::kQueryChunks)));
    // A CTA's share is about this many blocks at least, 64 KB a tile of rows: smaller ones would cost more
    // combining than they save.
    static constexpr int kMinBlocks = std::max(kRowTiles * 64 * 1024 / Base::kBlockBytes, Base::kWarps);
    // A CTA's share may grow or shrink by this many blocks to end where an item ends: some 32 KB, what an SM
    // reads in the time that combining takes.
    static constexpr int kSnapBlocks = 32 * 1024 / Base::kBlockBytes;
};

// How the host shares out the blocks of an item to CTAs.
enum class SplitPolicy {
    even,       // equally many CTAs to each item
    by_length,  // more to longer ones, in a batch whose lengths a warp can look at
    sized,      // splits of about one size: to each item as many as its own length asks for
    fixed,      // what follows from the item alone (fixed_splits.h): batch-invariant
};
constexpr int kMaxSequencesByLength = 32;

// kCtas: of an SM. One, with deeper queues, where a CTA has much to read: with room for a second one, the
// next launch's CTAs went two to some SMs and none to others. Two or more, where CTAs have little to read.
template <int kHeadDim, int kRowTiles, int kCtas_, int kWarps>
struct SplitKvConfig : DecodeConfig<kHeadDim, kRowTiles, kWarps> {
    using Base = DecodeConfig<kHeadDim, kRowTiles, kWarps>;
    static constexpr int kCtas = kCtas_;
    static constexpr int kTileChunks = Base::kBlockChunks / 2;  // of a block's keys, or of its values
    // Tiles that a warp has room for, an odd number: one in use and the others on their way.
    static constexpr int kRoomBytes = 226 / kCtas * 1024 - 16 * Base::kQueryChunks;
    static constexpr int kTiles = (kRoomBytes / (16 * kWarps * kTileChunks) - 1) / 2 * 2 + 1;
    static_assert(kTiles >= 3);
    // Items of up to this many keys are short: two blocks a warp.
    static constexpr int kShortKeys = 2 * kWarps * kBlockKeys;
    // Blocks of a split, at least: a warp has one, and all have 64 KB or little less. Twice as many take less
    // time than to combine two splits.
    static constexpr int kMinBlocks = std::max(64 * 1024 / Base::kBlockBytes, kWarps);
    OCTAVO_HD static int32_t splits_of(int32_t blocks) {
        return blocks <= 2 * kMinBlocks ? 1 : (blocks + kMinBlocks - 1) / kMinBlocks;
    }
};

// Of long items.
template <int kHeadDim, int kRowTiles>
using LongItems = SplitKvConfig<kHeadDim, kRowTiles, 1, decode_warps(kHeadDim, kRowTiles)>;

// Of short items.
template <int kHeadDim, int kRowTiles>
using ShortItems = SplitKvConfig<kHeadDim, kRowTiles, 2, decode_warps(kHeadDim, kRowTiles)>;

// Of many items, a CTA each: smaller CTAs, as many an SM as registers allow, so that some read while others
// start or end.
template <int kHeadDim, int kRowTiles>
using ManyItems = SplitKvConfig<kHeadDim, kRowTiles, (kHeadDim > 128 ? 2 : (kRowTiles == 1 ? 4 : 3)), 4>;

// Whether short items have a configuration of their own, unless their splits are fixed; otherwise that of
// many items serves them, which has as many warps.
template <int kHeadDim, int kRowTiles>
constexpr bool has_short_items() {
    return ManyItems<kHeadDim, kRowTiles>::kWarps != LongItems<kHeadDim, kRowTiles>::kWarps;
}

// Of few sequences, by their lengths: as many warps as one tile of rows has.
template <int kHeadDim, int kRowTiles>
using ByLength = SplitKvConfig<kHeadDim, kRowTiles, 1, decode_warps(kHeadDim, 1)>;

}  // namespace octavo::cuda
