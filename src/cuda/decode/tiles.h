// The shapes of the decode kernel.
#pragma once

#include <algorithm>
#include <cstddef>

namespace octavo::cuda {

constexpr int kBlockKeys = 16;         // what a warp works on at once: the depth of one product with V
constexpr int kMaxDecodeCtas = 256;    // one an SM
constexpr int kMaxDecodeBatch = 1024;  // the schedule keeps a number for each sequence in shared memory

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
    static constexpr int kPartialRow = kHeadDim + 4;
    // Blocks that a warp has on their way: up to 144 KB an SM, three times what HBM's latency asks for, and
    // what fits beside the queries of as many items and the pieces of items.
    static constexpr int kPieceBytes = kRows * (kPartialRow + 2) * 4;
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
using RunConfig =
    DecodeConfig<kHeadDim, kRowTiles, kRowTiles == 2 ? 6 : DecodeConfig<kHeadDim, kRowTiles>::kWarps, 1>;

}  // namespace octavo::cuda
