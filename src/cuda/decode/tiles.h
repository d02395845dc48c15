// What a CTA of the decode kernels is made of, for each head dim and number of rows.
#pragma once

#include "common/macros.h"
#include "cuda/codes.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace octavo::cuda {

constexpr int kStepKeys = 16;          // the depth of one product with V
constexpr int kMaxDecodeCtas = 256;    // CTAs of the stream-K kernel, one per SM
constexpr int kMaxDecodeBatch = 1024;  // its schedule keeps a number for each sequence in shared memory
// A CTA of either kernel takes up to this much shared memory, which Hopper and its successors have.
constexpr size_t kDecodeSharedBytes = 227 * 1024;

// One row of the table: a head dim and a number of rows that have kernels of their own. CMake compiles the
// rows of this table.
struct DecodeTiles {
    int head_dim;
    int row_tiles;   // tiles of eight rows; a row is one query token of one query head
    bool has_codes;  // whether caches of codes have kernels too; otherwise a later row serves them

    constexpr int rows() const { return 8 * row_tiles; }
};

constexpr DecodeTiles kDecodeTiles[] = {
    {64, 1, true},    //
    {64, 2, true},    //
    {96, 1, false},   //
    {96, 2, false},   //
    {128, 1, true},   //
    {128, 2, true},   //
    {192, 1, false},  //
    {256, 1, true},   //
    {512, 1, false},
};

// Instances for codes up to this head dim take no calls in which several KV heads share a head of the pages
// (with_group_parts).
constexpr int kHeadDimWithoutParts = 128;
constexpr int decode_warps(int head_dim, int row_tiles) { return row_tiles == 1 && head_dim <= 128 ? 8 : 4; }

// The constants that both kernels share. kFourRows: an item has no more than four rows, and lanes share their
// work (TransposedSoftmax).
template <int kHeadDim_, int kRowTiles_, int kWarps_, Codes kCodes_, bool kFourRows_ = false>
struct DecodeConfig {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr Codes kCodes = kCodes_;
    static constexpr bool kHasCodes = kCodes != Codes::none;
    static constexpr int kRowTiles = kRowTiles_;
    static constexpr bool kFourRows = kFourRows_;
    static constexpr int kRows = kFourRows ? 4 : 8 * kRowTiles;
    static constexpr int kWarps = kWarps_;
    static constexpr int kThreads = 32 * kWarps;
    // The keys that a warp copies and works on at a time. With codes, as many bytes are twice as many keys.
    static constexpr int kBlockKeys = kHasCodes ? 2 * kStepKeys : kStepKeys;
    // Sizes in chunks of 16 bytes: a row of keys, values or queries in shared memory (16-bit rows take whole
    // 128 bytes, for the swizzle); a block's keys and values; an item's queries with the slopes and
    // softmax_phi of their heads.
    static constexpr int kRowChunks = (kHeadDim + 63) / 64 * 8;
    static constexpr int kKeyBits = bits_of_keys(kCodes), kValueBits = bits_of_values(kCodes);
    static constexpr int kKeyChunks = kHasCodes ? kHeadDim * kKeyBits / 128 : kRowChunks;
    static constexpr int kValueChunks = kHasCodes ? kHeadDim * kValueBits / 128 : kRowChunks;
    static constexpr int kBlockChunks = kBlockKeys * (kKeyChunks + kValueChunks);
    static constexpr int kHeadNumberChunks = 8;
    static constexpr int kQueryChunks = kRows * kRowChunks + kHeadNumberChunks;
    static constexpr int kBlockBytes = 16 * kBlockChunks;
    // A block's scales are a word for each key, and one for each value.
    static constexpr int kScaleChunks = kHasCodes ? kBlockKeys / 2 : 0;
    // A row of a warp's partial result in shared memory, in floats: the dims, padded against bank conflicts.
    static constexpr int kWarpPartialRow = kHeadDim + 4;
    // A row of a CTA's partial result in the workspace, in words: the dims, then the softmax state, one copy
    // for each warp that may read it.
    static constexpr int kPartialRow = kHeadDim + 2 * kWarps;
};

// The warps of a CTA of the stream-K kernel, an even number, so that partial results begin on 16 bytes. With
// two tiles of rows a warp takes so long that four of them do not draw an SM's share of the bandwidth. For
// head dim 512, only two warps have room for a second block besides their queries and partial results. Over
// int4, and over all codes at head dim 64, a warp computes for longer than it reads, and blocks are small:
// more warps have room for two of them and registers.
constexpr int stream_k_warps(int head_dim, int row_tiles, Codes codes) {
    const bool has_small_blocks = codes == Codes::int4 || (codes != Codes::none && head_dim == 64);
    if (has_small_blocks) return head_dim > 128 ? 6 : row_tiles == 2 ? 8 : 12;
    return row_tiles == 2 ? 6 : head_dim > 256 ? 2 : decode_warps(head_dim, row_tiles);
}

// The configuration of the stream-K kernel, with one CTA on each SM.
template <int kHeadDim, int kRowTiles, Codes kCodes, bool kFourRows = false>
struct StreamKConfig
    : DecodeConfig<kHeadDim, kRowTiles, stream_k_warps(kHeadDim, kRowTiles, kCodes), kCodes, kFourRows> {
    using Base =
        DecodeConfig<kHeadDim, kRowTiles, stream_k_warps(kHeadDim, kRowTiles, kCodes), kCodes, kFourRows>;
    using OfFourRows = StreamKConfig<kHeadDim, kRowTiles, kCodes, true>;
    // Blocks that a warp has in flight: up to 144 KB per SM, three times as much as HBM's latency requires,
    // but no more than fit besides the queries of as many items and a partial result.
    static constexpr int kWarpPartialBytes = Base::kRows * (Base::kWarpPartialRow + 2) * 4;
    // (With codes, a warp's part of shared memory begins on 512 bytes, which wastes up to 6 KB.)
    static constexpr int kStages =
        std::min(144 * 1024 / (Base::kWarps * Base::kBlockBytes),
                 ((kCodes == Codes::none ? 219 : 214) * 1024 / Base::kWarps - kWarpPartialBytes) /
                     (16 * (Base::kBlockChunks + Base::kScaleChunks + Base::kQueryChunks)));
    static_assert(Base::kPartialRow % 4 == 0, "rows of partial results begin on 16 bytes");
    // A CTA's range costs as much as about this many blocks at least, 64 KB per tile of rows: combining
    // smaller ones would take longer than they save.
    static constexpr int kMinBlocks = std::max(kRowTiles * 64 * 1024 / Base::kBlockBytes, Base::kWarps);
    // A CTA's range may grow or shrink by this many blocks to end where an item ends: some 32 KB, which an SM
    // reads in the time that combining takes.
    static constexpr int kSnapBlocks = 32 * 1024 / Base::kBlockBytes;
    // What an item takes a warp besides its blocks, in blocks: page ids and then the first keys are waited
    // for, and in the end there is a result to be combined or written.
    static constexpr int kItemCost = kHeadDim > 128 ? 2 : 4;
};

// How the host divides the blocks of an item among CTAs.
enum class SplitPolicy {
    even,       // every item gets equally many CTAs
    by_length,  // longer items get more, in a batch whose lengths a warp can look at
    sized,      // splits have about one size: every item gets as many as its own length requires
    fixed,      // the cut follows from the item alone (fixed_splits.h): batch-invariant
};
constexpr int kMaxSequencesByLength = 32;

// The calls that an instance of the split-KV kernel serves.
enum class SplitKvCalls {
    plain,   // without options, of whole batches (plain_calls.h)
    all,     // with any options but the next two
    fixed,   // batch-invariant
    chosen,  // of chosen pages
};

// What a launch of the split-KV kernel runs beside: the kernel before it on the stream, over a shared prefix
// or over the numbers that codes became (ExpandedPlan). That kernel lets it start only when all earlier
// kernels whose results it reads are complete.
enum class Beside { nothing, prefix, numbers };

// A configuration of the split-KV kernel. kCtas: CTAs per SM. It is one, with deeper queues, where a CTA has
// much to read: with room for a second one, the next launch put two CTAs on some SMs and none on others. It
// is two or more where CTAs have little to read.
template <int kHeadDim, int kRowTiles, int kCtas_, int kWarps, Codes kCodes, bool kFourRows = false>
struct SplitKvConfig : DecodeConfig<kHeadDim, kRowTiles, kWarps, kCodes, kFourRows> {
    using Base = DecodeConfig<kHeadDim, kRowTiles, kWarps, kCodes, kFourRows>;
    using OfFourRows = SplitKvConfig<kHeadDim, kRowTiles, kCtas_, kWarps, kCodes, true>;
    static constexpr int kCtas = kCtas_;
    // The chunks of a block's keys, or of its values.
    static constexpr int kTileChunks = Base::kBlockKeys * std::max(Base::kKeyChunks, Base::kValueChunks);
    // How many tiles a warp has room for, an odd number: one in use and the others in flight. Each block in
    // flight, and the one in use, has its scales; a warp's part of shared memory begins on 512 bytes.
    static constexpr int kRoomBytes =
        226 / kCtas * 1024 - 16 * Base::kQueryChunks - (Base::kHasCodes ? 512 * kWarps : 0);
    static constexpr int kTileRoomBytes = 16 * kTileChunks + 8 * Base::kScaleChunks;
    static constexpr int kTiles =
        ((kRoomBytes - 16 * kWarps * Base::kScaleChunks) / (kWarps * kTileRoomBytes) - 1) / 2 * 2 + 1;
    static_assert(kTiles >= 3);
    static constexpr int kScaleTiles = (kTiles + 1) / 2;
    // The least number of blocks in a split: one for each warp, and 64 KB or little less in all, or as many
    // blocks of int4 as of 8-bit codes, since a warp takes as long for them. Up to twice as many blocks are
    // faster as one split than as two splits that have to be combined.
    static constexpr int kMinBlocks =
        std::max(64 * 1024 / (Base::kHasCodes ? 2 * Base::kBlockKeys * kHeadDim : Base::kBlockBytes), kWarps);
    OCTAVO_HD static int32_t splits_of(int32_t blocks) {
        return blocks <= 2 * kMinBlocks ? 1 : (blocks + kMinBlocks - 1) / kMinBlocks;
    }
};

// The configuration for long items. Codes take a warp longer, so that two tiles of rows have as many warps as
// one, and the configuration is that of ByLength.
template <int kHeadDim, int kRowTiles, Codes kCodes>
using LongItems = SplitKvConfig<kHeadDim, kRowTiles, 1,
                                decode_warps(kHeadDim, kCodes == Codes::none ? kRowTiles : 1), kCodes>;

// The number of CTAs on an SM that is wanted, or 1 where there is no room for more.
constexpr int fitting_ctas(int head_dim, int wanted) { return head_dim > 256 ? 1 : wanted; }

// The warps of a CTA for short items. Codes take more registers than two CTAs of eight warps have; with six
// warps, a thread has up to 168.
constexpr int short_items_warps(int head_dim, int row_tiles, Codes codes) {
    const int warps = decode_warps(head_dim, row_tiles);
    return codes != Codes::none && warps == 8 && head_dim > 64 ? 6 : warps;
}
template <int kHeadDim, int kRowTiles, Codes kCodes>
using ShortItems = SplitKvConfig<kHeadDim, kRowTiles, fitting_ctas(kHeadDim, 2),
                                 short_items_warps(kHeadDim, kRowTiles, kCodes), kCodes>;

// The CTAs per SM in the configuration for many items with one CTA each: the CTAs are smaller, and as many
// share an SM as registers allow, so that some read while others start or end. For codes, the configuration
// of short items was as fast.
constexpr int many_items_ctas(int head_dim, int row_tiles) {
    return head_dim > 128 ? fitting_ctas(head_dim, 2) : (row_tiles == 1 ? 4 : 3);
}
template <int kHeadDim, int kRowTiles, Codes kCodes>
using ManyItems =
    std::conditional_t<kCodes == Codes::none,
                       SplitKvConfig<kHeadDim, kRowTiles, many_items_ctas(kHeadDim, kRowTiles), 4, kCodes>,
                       ShortItems<kHeadDim, kRowTiles, kCodes>>;

// Whether short items have a configuration of their own, unless their splits are fixed. If not, the
// configuration for many items has as many warps and serves them.
template <int kHeadDim, int kRowTiles, Codes kCodes>
constexpr bool has_short_items() {
    return ManyItems<kHeadDim, kRowTiles, kCodes>::kWarps != ShortItems<kHeadDim, kRowTiles, kCodes>::kWarps;
}

// The configuration for few sequences, split by length: it has as many warps as one for one tile of rows.
template <int kHeadDim, int kRowTiles, Codes kCodes>
using ByLength = SplitKvConfig<kHeadDim, kRowTiles, 1, decode_warps(kHeadDim, 1), kCodes>;

// The configuration for fixed splits. kCtas, 1 or 2 per SM, is chosen by the number of CTAs. It must not
// change the bits, so both have the same number of warps, a power of two. Codes have one instance for both.
template <int kHeadDim, int kRowTiles, int kCtas, Codes kCodes>
using FixedItems =
    std::conditional_t<kCodes == Codes::none,
                       SplitKvConfig<kHeadDim, kRowTiles, fitting_ctas(kHeadDim, kCtas),
                                     decode_warps(kHeadDim, kRowTiles), kCodes>,
                       SplitKvConfig<kHeadDim, kRowTiles, fitting_ctas(kHeadDim, 2), 4, kCodes>>;

}  // namespace octavo::cuda
