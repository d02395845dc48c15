// What the host knows of the instances of the decode kernels, and which of them serve a call.
#pragma once

#include "cuda/decode/fixed_splits.h"
#include "cuda/decode/tiles.h"
#include "cuda/gpu.h"
#include "params/attention_params.h"

#include <optional>
#include <string>

namespace octavo::cuda {

// The host's knowledge of one configuration of the split-KV kernel.
struct SplitKvShape {
    int32_t warps;
    int32_t ctas;         // CTAs on an SM
    int32_t min_blocks;   // the least blocks that a split has
    int32_t block_bytes;  // bytes of the keys and values of a block
    int32_t row_words;    // words of a row's partial result

    template <class Config>
    static constexpr SplitKvShape of() {
        return {Config::kWarps, Config::kCtas, Config::kMinBlocks, Config::kBlockBytes, Config::kPartialRow};
    }
};

template <class Config>
int32_t most_fixed_splits(int32_t max_log2, int64_t blocks) {
    return FixedSplits<Config>(max_log2).most(blocks);
}

// The host's knowledge of the kernels of one row of kDecodeTiles.
struct DecodeShape {
    int32_t block_keys;
    SplitKvShape long_items, short_items, many_items, by_length, fixed;
    bool has_short_items;  // otherwise many_items serves short items
    int32_t short_keys;    // the most keys of a short item: two blocks for each warp
    int32_t (*max_fixed_splits_log2)(int32_t num_kv_heads);
    int32_t (*most_fixed_splits)(int32_t max_log2, int64_t blocks);
    int32_t stream_k_threads, stream_k_row_words;

    template <int kHeadDim, int kRowTiles, Codes kCodes>
    static constexpr DecodeShape of() {
        using Long = LongItems<kHeadDim, kRowTiles, kCodes>;
        using Fixed = FixedItems<kHeadDim, kRowTiles, 1, kCodes>;
        using StreamK = StreamKConfig<kHeadDim, kRowTiles, kCodes>;
        return {Long::kBlockKeys,
                SplitKvShape::of<Long>(),
                SplitKvShape::of<ShortItems<kHeadDim, kRowTiles, kCodes>>(),
                SplitKvShape::of<ManyItems<kHeadDim, kRowTiles, kCodes>>(),
                SplitKvShape::of<ByLength<kHeadDim, kRowTiles, kCodes>>(),
                SplitKvShape::of<Fixed>(),
                cuda::has_short_items<kHeadDim, kRowTiles, kCodes>(),
                2 * decode_warps(kHeadDim, kRowTiles) * Long::kBlockKeys,
                FixedSplits<Fixed>::max_log2,
                cuda::most_fixed_splits<Fixed>,
                StreamK::kThreads,
                StreamK::kPartialRow};
    }
};

const DecodeShape& shape_of(Codes codes, int32_t row);

// Which instances serve a problem: a row of kDecodeTiles, for what the pages hold.
struct Instance {
    int32_t row;
    Codes codes;
};

// The smallest row of kDecodeTiles that holds the larger head dim of the problem, if the decode kernels can
// serve it. Returns nothing otherwise; why_not, unless null, then gets the reason.
std::optional<Instance> choose_instance(const AttentionParams& p, const Gpu& gpu, std::string* why_not);

// Into how many parts the query heads of a KV head are divided: where no instance takes those of one query
// token. (divide_queries has parts of a sequence's tokens.)
int32_t group_parts_of(const AttentionParams& p);

// How many sequences a launch takes; it counts their blocks in 32 bits.
int32_t count_sequences(const AttentionParams& p);

}  // namespace octavo::cuda
