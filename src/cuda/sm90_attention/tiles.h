// The tiles of sm90_attention.
#pragma once

#include <cstdint>
#include <iterator>

namespace octavo::cuda {

constexpr int kSm90BlockColumns = 64;
constexpr int kSm90GroupRows = 64;  // rows of a warpgroup; a row is one query token of one query head
// Row tiles of at most this many rows take the way of few_rows.cuh. With 32 rows, mma.sync took longer than
// the wgmma of one warpgroup. Above head dim 128, and in kernels with converters, 16 rows spill registers.
constexpr int max_few_rows(int head_dim, bool has_codes) { return head_dim <= 128 && !has_codes ? 16 : 8; }
// The most splits into which a row tile's keys are cut: where the lengths of the sequences decide, and where
// they do not.
constexpr int kMaxSm90Splits = 32, kMaxEvenSm90Splits = 16;
// Where the lengths decide: the most splits that leave partial results, for each CTA.
constexpr int kMostSm90SplitsACta = 3;

// One row of the table: what a CTA is made of.
struct Sm90Tiles {
    int head_dim;
    int value_dim;   // the head dim of values and results
    int warpgroups;  // consumers of one CTA, 64 rows each
    int ctas;        // CTAs of one row tile: 1, or 2 that share K and V through a cluster, each loading half
    int keys;        // keys of one tile
    int stages;      // tiles of K in shared memory
    int v_stages;    // tiles of V there, which stay longer
    int q_slots;     // tiles of Q; the result leaves through the slot that its queries came in
    bool chained;    // whether the first scores of a row tile go with the last product of the one before
    // This row is preferred to earlier ones of its head dim if a query sees at least this many keys on
    // average.
    int from_keys;

    constexpr int row_blocks() const { return ctas * warpgroups; }  // of 64 rows, in a row tile
};

constexpr Sm90Tiles kSm90Tiles[] = {
    {64, 64, 4, 1, 64, 8, 8, 2, false, 0},     // short sequences: fewer waits at a tile's beginning and end
    {64, 64, 3, 1, 128, 4, 4, 2, false, 640},  //
    {96, 96, 3, 1, 80, 3, 3, 2, false, 0},     //
    {128, 128, 2, 1, 128, 2, 3, 2, true, 0},   // short sequences: row tiles of 192 rows would waste too many
    {128, 128, 3, 1, 80, 3, 3, 2, true, 0},    //
    {192, 128, 2, 1, 128, 2, 2, 1, false, 0},  //
    {192, 128, 2, 2, 128, 2, 2, 1, false, 512},  //
    {192, 192, 2, 1, 112, 2, 2, 1, false, 0},    //
    {192, 192, 2, 2, 112, 2, 2, 1, false, 512},  //
    {256, 256, 2, 1, 64, 2, 3, 1, false, 0},     //
    {256, 256, 2, 2, 80, 2, 2, 1, false, 512},
};

constexpr int kSm90MostHeadDim = std::rbegin(kSm90Tiles)->head_dim;

// The same over pages of codes, which one more warpgroup turns into tiles of 16-bit numbers. Where row tiles
// have one block of rows, as drafts do, the registers of the second consumer serve a second such warpgroup.
constexpr Sm90Tiles kSm90CodeTiles[] = {
    {64, 64, 2, 1, 128, 4, 4, 2, false, 0},
    {64, 64, 1, 1, 128, 6, 6, 2, false, 0},
    {128, 128, 2, 1, 96, 3, 3, 2, true, 0},
    {128, 128, 1, 1, 96, 4, 4, 2, true, 0},
};

// The tiles of the kernel that leaves part of its SM to CTAs of another kernel (Sm90Feature::beside): they
// decide how much shared memory it takes. It starts with kSm90RegistersBeside registers per thread.
constexpr Sm90Tiles kSm90TilesBeside = {128, 128, 2, 1, 64, 2, 2, 1, false, 0};
constexpr int kSm90RegistersBeside = 112;

// The tiles of the kernels for a block mask, whose blocks have this many queries and keys
// (Sm90Feature::blocks, and small_blocks for blocks of 64). A tile of keys lies in one block, and so do a
// warpgroup's rows.
struct Sm90BlockTiles {
    int block_size;
    Sm90Tiles tiles;
};
constexpr Sm90BlockTiles kSm90BlockTiles[] = {
    {128, {64, 64, 2, 1, 128, 4, 4, 2, true, 0}},
    {64, {64, 64, 3, 1, 64, 8, 8, 2, false, 0}},
    {128, {128, 128, 2, 1, 128, 2, 3, 2, true, 0}},
    {64, {128, 128, 2, 1, 64, 4, 6, 2, false, 0}},
};

constexpr Sm90Tiles sm90_block_tiles(int head_dim, int block_size) {
    for (const Sm90BlockTiles& row : kSm90BlockTiles) {
        if (row.tiles.head_dim == head_dim && row.block_size == block_size) return row.tiles;
    }
    return {};
}

constexpr Sm90Tiles sm90_tiles(int head_dim, int value_dim, int warpgroups, int ctas) {
    for (const Sm90Tiles& tiles : kSm90Tiles) {
        if (tiles.head_dim == head_dim && tiles.value_dim == value_dim && tiles.warpgroups == warpgroups &&
            tiles.ctas == ctas)
            return tiles;
    }
    return {};
}

constexpr Sm90Tiles sm90_code_tiles(int head_dim, int warpgroups) {
    for (const Sm90Tiles& tiles : kSm90CodeTiles) {
        if (tiles.head_dim == head_dim && tiles.warpgroups == warpgroups) return tiles;
    }
    return {};
}

// Whether there is a kernel for batches that mix row tiles of few rows with others, and (has_splits) one that
// splits the keys of row tiles. (For few rows, three warpgroups have no registers to spare, and four gain
// nothing at head dim 64.)
constexpr bool has_few_rows(int warpgroups, int ctas) { return warpgroups == 2 && ctas == 1; }
// Whether the kernel with splits, over numbers, chains row tiles. Three consumers have too few registers for
// it, and so have trees, ranges and codes.
constexpr bool chains_splits(const Sm90Tiles& tiles) { return tiles.chained && tiles.warpgroups == 2; }
// Values of another head dim have no kernel with splits.
constexpr bool has_splits(int head_dim, int value_dim, int ctas) {
    return ctas == 1 && head_dim == value_dim;
}
// Tree masks and bidirectional ranges have kernels of the first row of each head dim.
constexpr bool is_first_row(int head_dim, int value_dim, int warpgroups, int ctas) {
    for (const Sm90Tiles& tiles : kSm90Tiles) {
        if (tiles.head_dim == head_dim && tiles.value_dim == head_dim)
            return value_dim == head_dim && tiles.warpgroups == warpgroups && tiles.ctas == ctas;
    }
    return false;
}
// ALiBi that falls on both sides of a query has kernels where no CTAs work in pairs, on values of the same
// head dim.
constexpr bool has_symmetric_alibi(int head_dim, int value_dim, int ctas) {
    return ctas == 1 && head_dim == value_dim;
}
constexpr bool has_beside(int head_dim, int warpgroups, int ctas) {
    return head_dim == kSm90TilesBeside.head_dim && warpgroups == kSm90TilesBeside.warpgroups &&
           ctas == kSm90TilesBeside.ctas;
}
// Whether the instances of this row of kSm90Tiles are compiled together with those for a block mask.
constexpr bool has_blocks(int head_dim, int warpgroups, int ctas) {
    return ctas == 1 && ((head_dim == 64 && warpgroups == 3) || (head_dim == 128 && warpgroups == 2));
}

// Features that have kernels of their own. `beside` is for a shared prefix (SharedPrefixPlan): the kernel
// over the keys behind the prefix, which waits for memory, runs beside this one, which multiplies. `sinks` is
// for attention sinks and for chunks of positions (attention_chunk). `split_ranges` is `ranges` where the
// keys of row tiles are split.
enum class Sm90Feature {
    none,
    alibi,
    symmetric_alibi,
    dropout,
    sinks,
    few_rows,
    softcap,
    splits,
    beside,
    tree,
    ranges,
    split_ranges,
    blocks,
    small_blocks
};

// What K and V hold: 16-bit numbers, or codes, with scales of whole KV heads or of each token. The copy
// engine brings numbers, unless pages are too small for it: `gathered`.
enum class Sm90Cache { numbers, gathered, codes, codes_of_tokens };

template <int kHeadDim_, int kValueDim_, int kConsumers_, int kCtas_, Sm90Feature kFeature_,
          Sm90Cache kCache_ = Sm90Cache::numbers>
struct Sm90Config {
    static constexpr bool kBeside = kFeature_ == Sm90Feature::beside;
    // The size of the blocks of a block mask; 0: there is none.
    static constexpr int kBlockSize = kFeature_ == Sm90Feature::blocks         ? 128
                                      : kFeature_ == Sm90Feature::small_blocks ? 64
                                                                               : 0;
    static constexpr bool kBlocks = kBlockSize > 0;
    static constexpr bool kGathers = kCache_ == Sm90Cache::gathered;
    static constexpr bool kHasCodes = kCache_ != Sm90Cache::numbers && !kGathers;
    static constexpr bool kTokenScales = kCache_ == Sm90Cache::codes_of_tokens;
    static constexpr Sm90Tiles kTiles = kHasCodes ? sm90_code_tiles(kHeadDim_, kConsumers_)
                                        : kBeside ? kSm90TilesBeside
                                        : kBlocks ? sm90_block_tiles(kHeadDim_, kBlockSize)
                                                  : sm90_tiles(kHeadDim_, kValueDim_, kConsumers_, kCtas_);
    static_assert(kTiles.keys > 0, "no such row");
    static_assert(!kTiles.chained || kTiles.q_slots > 1, "the next queries need a slot of their own");
    static_assert(!kHasCodes || (kConsumers_ <= 2 && kCtas_ == 1), "a warp for the queries of each consumer");
    static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
    static_assert(kValueDim <= kHeadDim, "a result lies where its queries were");
    static constexpr int kConsumers = kConsumers_;
    static constexpr int kCtas = kCtas_;
    static constexpr bool kSharesColumns = false;  // what a CTA of a pair loads: half of the keys
    static constexpr int kTileBlocks = kTiles.row_blocks();
    // With a block mask: the blocks of queries in a row tile. Where there are several, each warpgroup
    // multiplies the tiles that its own block keeps, and passes over those of others.
    static constexpr int kQueryBlocks = kBlocks ? kTileBlocks * kSm90GroupRows / kBlockSize : 0;
    static_assert(!kBlocks || kQueryBlocks * kBlockSize == kTileBlocks * kSm90GroupRows);
    static constexpr bool kOwnTiles = kQueryBlocks > 1;
    static_assert(!kOwnTiles || !kTiles.chained);
    // Whether the warpgroups take turns at the tensor cores; for that all have to multiply the same tiles.
    static constexpr bool kTakesTurns = kConsumers_ > 1 && !kOwnTiles;
    // In other kernels the code for tree masks would spill registers.
    static constexpr bool kTree = kFeature_ == Sm90Feature::tree;
    // Whether there are bidirectional ranges, which are looked up for every row tile.
    static constexpr bool kSplitRanges = kFeature_ == Sm90Feature::split_ranges;
    static constexpr bool kRanges = kFeature_ == Sm90Feature::ranges || kSplitRanges;
    static constexpr bool kSplits = kFeature_ == Sm90Feature::splits || kTree || kSplitRanges;
    static constexpr bool kChained =
        kTiles.chained &&
        (!kSplits || (kFeature_ == Sm90Feature::splits && !kHasCodes && chains_splits(kTiles)));
    // As a branch in one kernel, ALiBi cost calls without it 2 to 7 % on an H200.
    static constexpr bool kAlibi = kFeature_ == Sm90Feature::alibi;
    // As a branch in those kernels, the other side cost one-sided ALiBi 3 to 5 % at head dim 64 on an H200.
    static constexpr bool kSymmetricAlibi = kFeature_ == Sm90Feature::symmetric_alibi;
    static constexpr bool kDropout = kFeature_ == Sm90Feature::dropout;
    // Plain calls have no code for a softcap, which has an instance of its own.
    static constexpr bool kMayCap = kFeature_ != Sm90Feature::none;
    // Whether the kernel tests for attention sinks and chunks of positions. Nothing hides the tests between
    // two row tiles: they cost sequences of 512 tokens up to 3 %.
    static constexpr bool kSinksAndChunks = kFeature_ != Sm90Feature::none;
    // Whether ALiBi is part of the product Q K^T: where instructions are scarcer than turns at the tensor
    // cores.
    static constexpr bool kAlibiProduct = kAlibi && kHeadDim == 64;
    static constexpr int kKeys = kTiles.keys;
    static constexpr int kStages = kTiles.stages, kVStages = kTiles.v_stages;
    static constexpr int kQSlots = kTiles.q_slots;
    static constexpr int kGroupRows = kSm90GroupRows;
    // Over codes: the warpgroups that convert. One converts K and V, and of two, each one of these.
    static constexpr int kConverters = kHasCodes ? 3 - kConsumers : 0;
    // Whether consumers order the numbers that other threads wrote before their own products. The fence waits
    // for loads that are under way: converters, of which one has two tiles on their way, would wait for
    // these, and so would a warp that gathers keys.
    static constexpr bool kConsumersFence = kConverters == 2 || kGathers;
    // The order of warpgroups: the producer, over codes the converters, and the consumers.
    static constexpr int kFirstConsumer = 1 + kConverters;
    static constexpr int kThreads = 128 * (kFirstConsumer + kConsumers);
    // How many arrivals hand on a tile of K or V: those of the copies of each lane of the producer, which
    // gathers it, one of each warp of a converter, or one of the producer.
    static constexpr int kTileArrivals = kHasCodes ? 4 : kGathers ? 128 : 1;
    // Whether a warp of its own hands out work. Elsewhere the one that loads Q and K does, which is quicker
    // where no lengths have to be looked at, or one of those that gather keys.
    static constexpr bool kOwnScheduler = kSplits && kCache_ == Sm90Cache::numbers;
    static_assert(!kOwnScheduler || kCtas_ == 1);
    // How many warps take work besides those of the consumers: the one that stores results, over codes those
    // that convert queries, K and V, and otherwise all that each producer uses but the one that hands it out.
    static constexpr int kOtherTakers = kHasCodes                   ? 1 + kConsumers + 4 * kConverters
                                        : kGathers || kOwnScheduler ? 3
                                                                    : 3 * kCtas_ - 1;
    // Tiles lie in shared memory as blocks of 64 columns, each of rows of 128 bytes with 128-byte swizzle.
    static constexpr int kBlockColumns = kSm90BlockColumns;
    static constexpr int kColumnBlocks = (kHeadDim + kBlockColumns - 1) / kBlockColumns;
    static constexpr int kValueBlocks = (kValueDim + kBlockColumns - 1) / kBlockColumns;
    static constexpr int kRowBytes = 2 * kBlockColumns;
    static constexpr int kKeyBlockBytes = kKeys * kRowBytes;
    static constexpr int kQBlockBytes = kGroupRows * kRowBytes;
    static constexpr int kKeyTileBytes = kColumnBlocks * kKeyBlockBytes;
    static constexpr int kValueTileBytes = kValueBlocks * kKeyBlockBytes;
    static constexpr int kQTileBytes = kColumnBlocks * kQBlockBytes;  // the queries of one warpgroup
    // How many registers a thread setmaxnreg leaves the producer and gives the consumers: out of the SM's 64
    // K, or (beside another kernel) out of those that the kernel starts with.
    static constexpr int kProducerRegisters = kBeside || kHasCodes ? 24 : kConsumers >= 3 ? 32 : 40;
    static constexpr int kConverterRegisters = kConverters == 2 ? 128 : 88;
    static constexpr int kConsumerRegisters = kBeside            ? 152
                                              : kConverters == 2 ? 232
                                              : kHasCodes        ? 200
                                              : kConsumers == 4  ? 112
                                              : kConsumers == 3  ? 160
                                                                 : 232;
    static_assert(!kBeside || kProducerRegisters + kConsumers * kConsumerRegisters <=
                                  (kConsumers + 1) * kSm90RegistersBeside);
    // A warpgroup would wait for ever for more registers than a CTA starts with: multiples of eight a thread.
    static_assert(kBeside ||
                  kProducerRegisters + kConverters * kConverterRegisters + kConsumers * kConsumerRegisters <=
                      kThreads / 128 * (65536 / kThreads / 8 * 8));
    // Whether the code between two row tiles is kept short, at the cost of registers that other kernels lack.
    static constexpr bool kShortEnds = !kAlibi && !kSymmetricAlibi && !kDropout && !kSplits && kCtas == 1;
    // In the kernel with splits, the way of few rows made all row tiles slower, since registers spilled.
    static constexpr int kFewRowTiles =
        kFeature_ == Sm90Feature::few_rows ? max_few_rows(kHeadDim, kHasCodes) / 8 : 0;
};

}  // namespace octavo::cuda
