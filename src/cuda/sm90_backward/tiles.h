// The tiles of sm90_backward.
#pragma once

#include <cstdint>

namespace octavo::cuda {

// One row of the table: what a CTA is made of, beside a warpgroup that loads.
struct Sm90BackwardTiles {
    int head_dim;
    int warpgroups;  // of 64 keys each
    int queries;     // of one tile
    int ds_slots;    // tiles of dS in shared memory, which products for dQ read a step late
    bool held;       // exponentials stay before the wait for V dO^T
    bool turns;  // one warpgroup at a time issues scores and products, so that the others' exponentials run

    constexpr int keys() const { return 64 * warpgroups; }
};

constexpr Sm90BackwardTiles kSm90BackwardTiles[] = {
    {64, 2, 128, 2, false, true},  //
    {128, 2, 64, 3, true, false},  //
};

template <int kRow>
struct Sm90BackwardConfig {
    static constexpr Sm90BackwardTiles kTiles = kSm90BackwardTiles[kRow];
    static constexpr int kHeadDim = kTiles.head_dim;
    static constexpr int kConsumers = kTiles.warpgroups;
    static constexpr int kThreads = 128 * (1 + kConsumers);
    static constexpr int kKeys = kTiles.keys();
    static constexpr int kQueries = kTiles.queries;
    static constexpr int kStages = 2;  // tiles of Q and of dO
    static constexpr int kDsSlots = kTiles.ds_slots;
    static constexpr bool kHeld = kTiles.held, kTurns = kTiles.turns;
    // Tiles lie in shared memory as blocks of 64 columns, each of rows of 128 bytes with 128-byte swizzle.
    static constexpr int kRowBytes = 128;
    static constexpr int kColumnBlocks = kHeadDim / 64;
    static constexpr int kKeyBlockBytes = kKeys * kRowBytes;
    static constexpr int kQueryBlockBytes = kQueries * kRowBytes;
    static constexpr int kKeyTileBytes = kColumnBlocks * kKeyBlockBytes;
    static constexpr int kQueryTileBytes = kColumnBlocks * kQueryBlockBytes;
    static constexpr int kDsTileBytes = kQueries / 64 * kKeyBlockBytes;  // [keys][queries]
    // What setmaxnreg leaves the loader and gives the consumers.
    static constexpr int kLoaderRegisters = 24, kConsumerRegisters = 240;
    // A warpgroup's part of a tile of dQ: 64 x 64.
    static_assert(kQueries * kHeadDim == 64 * 64 * kConsumers);
};

}  // namespace octavo::cuda
