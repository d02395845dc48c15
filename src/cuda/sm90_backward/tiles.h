// The tiles of sm90_backward.
#pragma once

#include "common/macros.h"

#include <cstdint>
#include <type_traits>

namespace octavo::cuda {

// A number as a sum of three bfloat16 numbers, exact to 24 bits. They are a row of a wgmma operand, whose
// product with another one (Sm90BackwardShared::write_factors) adds the number to a column of scores. Three
// more may hold a slope in the same way; zeros follow.
struct alignas(16) BfloatTerms {
    uint16_t terms[8];
};

// One row of the table: what a CTA is made of, beside a warpgroup that loads.
struct Sm90BackwardTiles {
    int head_dim;
    int warpgroups;  // warpgroups of 64 keys each
    int queries;     // queries of one tile
    // Tiles of dS in shared memory, which products for dQ read a step late; 0: dQ has a kernel of its own,
    // and bits are the same at every call.
    int ds_slots;
    bool roles;  // two warpgroups share 64 keys: one has dV, the other dK

    // A cluster of two CTAs has two such tiles of keys, and each sums half of the columns of dQ over both.
    constexpr bool pairs() const { return roles && !dq_apart(); }
    constexpr int ctas() const { return pairs() ? 2 : 1; }
    constexpr int keys() const { return roles ? 64 : 64 * warpgroups; }  // of a CTA
    constexpr int cluster_keys() const { return ctas() * keys(); }
    // Tiles lie in shared memory as blocks of these columns.
    constexpr int block_columns() const { return head_dim % 64 != 0 || pairs() ? 32 : 64; }
    constexpr bool dq_apart() const { return ds_slots == 0; }
    constexpr int consumer_warps() const { return 4 * warpgroups; }
    constexpr bool persistent() const { return !roles; }  // a CTA works through many tiles of keys
};

constexpr Sm90BackwardTiles kSm90BackwardTiles[] = {
    {64, 2, 128, 2, false},  //
    {96, 2, 64, 3, false},   //
    {128, 2, 64, 3, false},  //
    {64, 2, 128, 0, false},  // where bits are to be the same at every call
    {128, 2, 64, 0, false},  // likewise
    {192, 2, 64, 2, true},   //
    {192, 2, 64, 0, true},   // likewise, and up to head dim 160 (find_tiles, in plan.cpp)
    {256, 2, 64, 0, true},   //
};

// What an instance computes beside plain attention; of more than one there is none.
enum class Sm90BackwardFeature : uint8_t { none, alibi, symmetric_alibi, softcap, dropout, blocks, ordered };
// In the order of the enumeration.
constexpr Sm90BackwardFeature kSm90BackwardFeatures[] = {
    Sm90BackwardFeature::none,    Sm90BackwardFeature::alibi,   Sm90BackwardFeature::symmetric_alibi,
    Sm90BackwardFeature::softcap, Sm90BackwardFeature::dropout, Sm90BackwardFeature::blocks,
    Sm90BackwardFeature::ordered};

// Which instances there are. Head dim 96 has them for plain calls alone: others take those of 128.
constexpr bool has_instance(const Sm90BackwardTiles& tiles, Sm90BackwardFeature feature) {
    return feature == Sm90BackwardFeature::none ||
           (!tiles.dq_apart() && !tiles.roles && tiles.head_dim != 96);
}

// How many rows of terms of scores a query has. With symmetric ALiBi they are two: for keys that do not lie
// behind it, and for those that do, where the slope has the other sign (alibi.cuh).
constexpr int score_terms(Sm90BackwardFeature feature) {
    return feature == Sm90BackwardFeature::symmetric_alibi ? 2 : 1;
}

// Whether sums of dQ are converted beside the products.
constexpr bool converts_beside(const Sm90BackwardTiles& tiles, Sm90BackwardFeature feature) {
    return !tiles.dq_apart() && !tiles.roles && feature != Sm90BackwardFeature::ordered;
}

// How many queries of a step follow one another. Where a mask hides blocks, a step takes such parts wherever
// they are.
constexpr int part_queries(const Sm90BackwardTiles& tiles, Sm90BackwardFeature feature) {
    return feature == Sm90BackwardFeature::blocks ? 64 : tiles.queries;
}

// Where the number of a query lies among those of a tile. A lane needs the numbers of its columns, 8 i + 2
// (lane % 4) and the next one. They follow one another in pieces of four, and the same piece of four lanes
// lies in different banks.
template <int kQueries>
OCTAVO_HD constexpr int statistic_place(int query) {
    const int pair = query % 8 / 2, piece = (query / 16) ^ pair;
    return pair * (kQueries / 4) + piece * 4 + query / 8 % 2 * 2 + query % 2;
}

template <int kRow, Sm90BackwardFeature kFeature = Sm90BackwardFeature::none>
struct Sm90BackwardConfig {
    static constexpr Sm90BackwardTiles kTiles = kSm90BackwardTiles[kRow];
    static constexpr int kHeadDim = kTiles.head_dim;
    static constexpr int kConsumers = kTiles.warpgroups;
    static constexpr int kConsumerWarps = kTiles.consumer_warps();
    static constexpr int kCtas = kTiles.ctas();  // of a cluster
    static constexpr int kKeys = kTiles.keys();
    static constexpr int kQueries = kTiles.queries;
    static constexpr int kPartQueries = part_queries(kTiles, kFeature);
    static constexpr int kParts = kQueries / kPartQueries;  // of a step
    // Tiles of Q and of dO. In a cluster, K and V lie in the last ones until they are in registers.
    static constexpr int kStages = kCtas > 1 ? 3 : 2;
    static constexpr int kWeightSlots = 2;  // with roles: tiles of weights between the warpgroups
    static constexpr bool kRoles = kTiles.roles, kDqApart = kTiles.dq_apart();
    static constexpr int kDsSlots = kDqApart ? 1 : kTiles.ds_slots;
    static constexpr bool kSymmetric = kFeature == Sm90BackwardFeature::symmetric_alibi;
    static constexpr bool kAlibi = kFeature == Sm90BackwardFeature::alibi || kSymmetric;
    static constexpr bool kSoftcap = kFeature == Sm90BackwardFeature::softcap;
    static constexpr bool kDropout = kFeature == Sm90BackwardFeature::dropout;
    static constexpr bool kBlocks = kFeature == Sm90BackwardFeature::blocks;
    static constexpr bool kOrdered = kFeature == Sm90BackwardFeature::ordered;
    // Warps beside the loader convert sums of dQ (finished_sums.cuh); elsewhere a kernel does so in the end.
    static constexpr bool kBeside = converts_beside(kTiles, kFeature);
    // One warpgroup at a time issues scores and products, so that the other's exponentials run meanwhile.
    // Other calls take less time without turns.
    static constexpr bool kTurns = kQueries == 128 && (kAlibi || kDropout);
    // Weights times the derivative of a cap have 16 bits where there are no registers for more.
    static constexpr bool kPacked = kSoftcap && kQueries == 128;
    // Warpgroups: the loader's, the consumers, and with dropout one that draws.
    static constexpr int kThreads = 128 * (1 + kConsumers + kDropout);
    static constexpr int kDrawingWarps = 4;
    // Statistics of a query: terms of a product, or where scores change on their way from that product, or
    // gradients, numbers.
    using Lse = std::conditional_t<kSoftcap, float, BfloatTerms>;
    using Delta = std::conditional_t<kDropout, float, BfloatTerms>;
    // Tiles lie in shared memory as blocks of 64 columns, each of rows of 128 bytes with 128-byte swizzle, or
    // of 32 columns, with rows and a swizzle of 64 bytes.
    static constexpr int kBlockColumns = kTiles.block_columns();
    static constexpr int kRowBytes = 2 * kBlockColumns;
    static constexpr int kColumnBlocks = kHeadDim / kBlockColumns;
    static constexpr int kKeyBlockBytes = kKeys * kRowBytes;
    static constexpr int kQueryBlockBytes = kQueries * kRowBytes;
    static constexpr int kKeyTileBytes = kColumnBlocks * kKeyBlockBytes;
    static constexpr int kQueryTileBytes = kColumnBlocks * kQueryBlockBytes;
    // [keys][queries], as blocks of 64 queries; where dQ has a kernel of its own, nothing lies there.
    static constexpr int kDsRowBytes = 128, kDsBlockBytes = kKeys * kDsRowBytes;
    static constexpr int kDsTileBytes = kDqApart ? 16 : kCtas * (kQueries / 64) * kDsBlockBytes;
    // A CTA works through many tiles of keys, and dK and dV leave from where tiles of dS lie, so that the
    // next keys may come meanwhile. With roles there is no room for that: a CTA has one tile, and dK and dV
    // leave from where K and V were.
    static constexpr bool kPersistent = kTiles.persistent();
    static constexpr int kDsBytes = kPersistent && kDsSlots * kDsTileBytes < 2 * kKeyTileBytes
                                        ? 2 * kKeyTileBytes
                                        : kDsSlots * kDsTileBytes;
    // The blocks of columns of a CTA of a cluster: those of Q and dO that it loads, and of dQ that it sums.
    static constexpr int kOwnBlocks = kColumnBlocks / kCtas;
    // What setmaxnreg leaves the other warpgroups, and gives the consumers.
    static constexpr int kLoaderRegisters = 24, kDrawingRegisters = 24;
    static constexpr int kConsumerRegisters = kDropout ? 232 : 240;
    // A warpgroup's part of a tile of dQ has 64 queries, and where a tile has no more, part of the columns.
    static constexpr bool kDqByRows = kQueries == 64 * kConsumers;
    static constexpr int kDqParts = kConsumers * kCtas;
    static constexpr int kDqColumns = kDqByRows ? kHeadDim : kHeadDim / kDqParts;
    static_assert(kDqApart || kQueries * kHeadDim == 64 * kDqColumns * kDqParts);
    // Which column of dQ is that column of a part. In a cluster one warpgroup computes two parts; elsewhere a
    // part has whole blocks, and half of the last one where their number is odd.
    static constexpr int kDqWholeColumns = kDqColumns / kBlockColumns * kBlockColumns;
    OCTAVO_HD static constexpr int dq_column(int part, int column) {
        if (kDqByRows) return column;
        if (kCtas > 1 || kDqWholeColumns == kDqColumns) return part * kDqColumns + column;
        if (column < kDqWholeColumns) return part * kDqWholeColumns + column;
        return kDqParts * kDqWholeColumns + part * (kDqColumns - kDqWholeColumns) + column - kDqWholeColumns;
    }
};

// Between rows of 16 bits that a warp makes of sums of dQ: eight of them lie in different banks.
template <class Config>
constexpr int kConvertedStride = Config::kDqColumns + 8;

// A CTA of sm90_query_gradients_kernel has two warpgroups of 64 queries each.
constexpr int kSm90GradientGroups = 2, kSm90GradientQueries = 64 * kSm90GradientGroups;

}  // namespace octavo::cuda
