// The tiles of sm80_attention.
#pragma once

#include "common/macros.h"

#include <cstddef>
#include <cstdint>

namespace octavo::cuda {

// One row of the table: what a CTA is made of. A head dim has up to two rows: one for every GPU, of which an
// SM of an A100 holds two CTAs, and one in which K and V arrive a whole tile ahead, for GPUs with more shared
// memory. The measurements that chose them are in docs/kernels/sm80_attention.md.
struct Sm80Tiles {
    int head_dim;
    int stages;  // tiles of K, and of V, in shared memory
    int warps;
    int row_tiles;    // tiles of 16 rows that a warp owns: each fragment of K and V serves all of them
    int keys;         // keys of one tile
    int ctas_per_sm;  // the number of CTAs on an SM that the registers must suffice for
    // How many warps share their rows. Each owns a part of the columns: it sums the products of queries and
    // keys over that part, to which the others' sums come through shared memory, and it computes that part of
    // the result.
    int column_warps;

    constexpr int rows() const { return 16 * row_tiles * warps / column_warps; }
};

constexpr Sm80Tiles kSm80Tiles[] = {
    {64, 1, 4, 2, 64, 3, 1},   //
    {64, 2, 4, 2, 64, 3, 1},   //
    {96, 1, 4, 2, 64, 2, 1},   //
    {96, 2, 4, 2, 64, 2, 1},   //
    {128, 1, 4, 2, 64, 2, 1},  //
    {128, 2, 4, 2, 64, 2, 1},  //
    {256, 1, 4, 1, 32, 2, 1},  //
    {256, 2, 8, 1, 64, 1, 1},  //
    {512, 1, 8, 1, 16, 1, 2},  //
    {512, 2, 8, 1, 32, 1, 2},
};

// What an instance computes besides plain attention: `dropout`, `codes` (a quantised cache), `blocks` (a
// block mask, with or without dropout), `ranges` (bidirectional ranges, with or without dropout) or
// `code_ranges` (such ranges over a quantised cache). Each of them also serves symmetric ALiBi, so that plain
// attention has no instruction for it: a call that needs nothing else takes `dropout`.
enum class Sm80Feature : uint8_t { none, dropout, codes, blocks, ranges, code_ranges };

OCTAVO_HD constexpr bool reads_codes(Sm80Feature feature) {
    return feature == Sm80Feature::codes || feature == Sm80Feature::code_ranges;
}
OCTAVO_HD constexpr bool has_ranges(Sm80Feature feature) {
    return feature == Sm80Feature::ranges || feature == Sm80Feature::code_ranges;
}

constexpr Sm80Tiles sm80_tiles(int head_dim, int stages) {
    for (const Sm80Tiles& tiles : kSm80Tiles) {
        if (tiles.head_dim == head_dim && tiles.stages == stages) return tiles;
    }
    return {};
}

// The shared memory that a block may take. Every GPU from sm_80 up has 99 KB, Hopper 227.
constexpr size_t sm80_shared_bytes(int stages) { return (stages == 1 ? 99 : 227) << 10; }

template <int kHeadDim_, int kStages_>
struct Sm80Config {
    static constexpr Sm80Tiles kTiles = sm80_tiles(kHeadDim_, kStages_);
    static_assert(kTiles.keys > 0, "no such row");
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kStages = kStages_;
    static constexpr int kWarps = kTiles.warps;
    static constexpr int kRowTiles = kTiles.row_tiles;
    static constexpr int kKeys = kTiles.keys;
    static constexpr int kCtasPerSm = kTiles.ctas_per_sm;
    static constexpr int kColumnWarps = kTiles.column_warps;
    static constexpr int kWarpColumns = kHeadDim / kColumnWarps;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kWarpRows = 16 * kRowTiles;  // a row: one query token of one query head
    static constexpr int kRows = kTiles.rows();
    // A row in shared memory is 16 bytes longer than its data: eight rows of one 16-byte column then lie in
    // different banks, as with a swizzle, but every address of a fragment is one register and a constant.
    static constexpr int kRowStride = kHeadDim + 8;
    static constexpr int kLanesPerRow =  // lanes that copy one row together
        kHeadDim == 512      ? 16
        : kHeadDim % 64 == 0 ? 8
                             : 4;
};

}  // namespace octavo::cuda
