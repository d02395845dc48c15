// The tiles of sm90_wide_attention.
#pragma once

#include "cuda/sm90_attention/tiles.h"

namespace octavo::cuda {

// What a CTA is made of. The warps that sm90_attention lends to this kernel (the scheduler, the loader of
// keys, the rows) find here what they read of Sm90Config.
struct Sm90WideConfig {
    static constexpr int kHeadDim = 512;
    static constexpr int kCtas = 2;               // a pair works on one row tile, 64 rows each
    static constexpr bool kSharesColumns = true;  // what a CTA of a pair loads: half of the columns
    static constexpr int kTileBlocks = kCtas;
    static constexpr int kGroupRows = kSm90GroupRows;
    static constexpr int kKeys = 64;
    // Queries, keys and values come in chunks of so many columns. Each chunk of a tile has a slot of its own.
    static constexpr int kChunkColumns = 128;
    static constexpr int kChunks = kHeadDim / kChunkColumns;
    static constexpr int kWeightSlots = 2;
    // Warpgroups: the producer, the scorer, and the multipliers, which own a part of the columns each.
    static constexpr int kMultipliers = 2;
    static constexpr int kThreads = 128 * (2 + kMultipliers);
    static constexpr int kMultiplierChunks = kChunks / kMultipliers;
    // How many warps take work besides those of the consumers: the loaders, but the one that hands it out.
    static constexpr int kOtherTakers = 2 * kCtas - 1;
    static constexpr int kConsumerWarps = 4 * (1 + kMultipliers);

    static constexpr int kBlockColumns = kSm90BlockColumns;
    static constexpr int kChunkBlocks = kChunkColumns / kBlockColumns;
    static constexpr int kRowBytes = 2 * kBlockColumns;
    static constexpr int kKeyBlockBytes = kKeys * kRowBytes;
    static constexpr int kQBlockBytes = kGroupRows * kRowBytes;
    static constexpr int kChunkBytes = kChunkBlocks * kKeyBlockBytes;
    static constexpr int kQChunkBytes = kChunkBlocks * kQBlockBytes;

    static constexpr int kProducerRegisters = 32, kScorerRegisters = 128, kMultiplierRegisters = 176;
    static_assert(kProducerRegisters + kScorerRegisters + kMultipliers * kMultiplierRegisters <= 512);

    static constexpr bool kAlibi = false, kSymmetricAlibi = false, kSplits = false, kBlocks = false,
                          kOwnTiles = false, kRanges = false;
    static constexpr bool kSinksAndChunks = true, kMayCap = true;
    static constexpr int kFewRowTiles = 0;
};

}  // namespace octavo::cuda
