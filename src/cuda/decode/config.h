// The shapes of the decode kernel.
#pragma once

#include <cstddef>

namespace octavo::cuda {

constexpr int kBlockKeys = 16;         // what a warp works on at once: the depth of one product with V
constexpr int kMaxDecodeCtas = 256;    // one an SM
constexpr int kMaxDecodeBatch = 1024;  // the schedule keeps a number for each sequence in shared memory

template <int kHeadDim_, int kRowTiles_>
struct DecodeConfig {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kRowTiles = kRowTiles_;  // of eight rows: (query token, head of the group)
    static constexpr int kRows = 8 * kRowTiles;
    static constexpr int kWarps = 8;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kKChunks = kHeadDim / 32, kVChunks = (kHeadDim + 63) / 64;  // of a lane's fragments
    // 16-byte chunks of a row in shared memory, and of a block.
    static constexpr int kRowChunks = kVChunks * 8;
    static constexpr int kBlockChunks = 2 * kBlockKeys * kRowChunks;
    // Blocks that a warp has on their way: 128 KB an SM, four times what HBM's latency asks for.
    static constexpr int kStages = kHeadDim <= 64 ? 4 : 2;
    // A CTA's share may grow or shrink by as many blocks to end where an item ends: some 32 KB, what an SM
    // reads in the time of a merge.
    static constexpr int kSnapBlocks = 32 * 1024 / (kBlockChunks * 16);
};

}  // namespace octavo::cuda
