// The shapes of the decode kernel that deals blocks out.
#pragma once

#include "common/macros.h"
#include "cuda/decode/config.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace octavo::cuda {

// Who works on an item.
enum class Dealing {
    even,             // equally many CTAs on each
    by_length,        // more on longer ones, of a batch whose lengths a warp knows
    batch_invariant,  // one on a unit (units.cuh)
};
constexpr int kMaxSequencesByLength = 32;

// kCtas: of an SM. One, with the deeper queues, where a CTA has much to read: with room for a second one, the
// next launch's CTAs went two to some SMs and none to others. Two or more, where CTAs have little.
template <int kHeadDim, int kRowTiles, int kCtas_, int kWarps = DecodeConfig<kHeadDim, kRowTiles>::kWarps>
struct DealtConfig : DecodeConfig<kHeadDim, kRowTiles, kWarps> {
    using Base = DecodeConfig<kHeadDim, kRowTiles, kWarps>;
    static constexpr int kCtas = kCtas_;
    static constexpr int kTileChunks = Base::kBlockChunks / 2;  // of a block's keys, or of its values
    // Tiles that a warp has room for, an odd number: one in use and the others on their way.
    static constexpr int kRoomBytes = 226 / kCtas * 1024 - 16 * Base::kQueryChunks;
    static constexpr int kTiles = (kRoomBytes / (16 * Base::kWarps * kTileChunks) - 1) / 2 * 2 + 1;
    static_assert(kTiles >= 3);
    // A row that a CTA hands to the mergers: its dims, then maximum and sum for each warp that may read them.
    static constexpr int kPushedRow = kHeadDim + 2 * Base::kWarps;
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
using ShortConfig = DealtConfig<kHeadDim, kRowTiles, 2>;

// Of many items, a CTA each: smaller CTAs, as many an SM as registers allow, so that some read while others
// start or end.
template <int kHeadDim, int kRowTiles>
using ManyConfig = DealtConfig<kHeadDim, kRowTiles, (kHeadDim > 128 ? 2 : (kRowTiles == 1 ? 4 : 3)), 4>;

// By length: as many warps as one tile of rows has.
template <int kHeadDim, int kRowTiles>
using ByLengthConfig = DealtConfig<kHeadDim, kRowTiles, 1, kHeadDim <= 128 ? 8 : 4>;

}  // namespace octavo::cuda
