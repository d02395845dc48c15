// The shapes of the decode kernel that deals blocks out.
#pragma once

#include "cuda/decode/config.h"

#include <cstddef>

namespace octavo::cuda {

// kCtas: of an SM. One, with the deeper queues, where a CTA has much to read: with room for a second one, the
// next launch's CTAs went two to some SMs and none to others. Two, where CTAs are many and have little.
template <int kHeadDim, int kRowTiles, int kCtas_>
struct DealtConfig : DecodeConfig<kHeadDim, kRowTiles> {
    using Base = DecodeConfig<kHeadDim, kRowTiles>;
    static constexpr int kCtas = kCtas_;
    static constexpr int kTileChunks = Base::kBlockChunks / 2;  // of a block's keys, or of its values
    // Tiles that a warp has room for, an odd number: one in use and the others on their way.
    static constexpr int kRoomBytes = (kCtas == 1 ? 226 : 113) * 1024 - 16 * Base::kQueryChunks;
    static constexpr int kTiles = (kRoomBytes / (16 * Base::kWarps * kTileChunks) - 1) / 2 * 2 + 1;
    static_assert(kTiles >= 3);
    // A row that a CTA hands to the mergers: its dims, then maximum and sum for each warp that may read them.
    static constexpr int kPushedRow = kHeadDim + 2 * Base::kWarps;
    // Items of so many keys are short: two blocks a warp.
    static constexpr int kShortKeys = 2 * Base::kWarps * kBlockKeys;
};

}  // namespace octavo::cuda
