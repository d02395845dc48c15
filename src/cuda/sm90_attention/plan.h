// How sm90_attention would work through a batch.
#pragma once

#include "cuda/codes.h"
#include "cuda/gpu.h"
#include "cuda/plan.h"
#include "cuda/sm90_attention/row_tiles.h"
#include "cuda/sm90_attention/tiles.h"
#include "params/attention_params.h"

#include <optional>
#include <string>
#include <vector>

namespace octavo::cuda {

// Sm90Launch, in parameters.h, says more about what most of these mean to the kernel.
struct Sm90Plan {
    DType dtype;
    Codes codes;
    bool token_scales;  // over codes: whether keys or values have scales of their own
    int32_t row;        // a row of kSm90Tiles or kSm90CodeTiles; with dtype and feature it names the instance
    Sm90Feature feature;
    int32_t block_row;  // a row of kSm90BlockTiles, with a block mask
    int32_t num_sequences;
    int32_t heads, tokens;  // heads and tokens side by side in the 64 rows of a warpgroup
    int32_t box_keys;       // keys that one copy brings; 0 where the copy engine brings none
    bool gathers;           // whether keys are gathered one by one, from small pages
    bool few_rows;          // whether some row tiles may be of few rows
    int64_t num_row_tiles;  // over the batch and all heads; a bound when the queries are packed

    Sm90Order order;

    // The keys of each row tile behind the first `num_whole` are cut into num_splits splits; 0: of none.
    int32_t num_whole, num_splits;
    bool by_length;  // whether the kernel cuts those of long sequences instead, where lengths are unlike
    int32_t split_blocks;  // the most blocks of 64 rows that hold rows of a row tile

    int32_t num_ctas;
    int64_t partial_bytes, num_counters;  // parts of the workspace

    const Sm90Tiles& tiles() const {
        if (codes != Codes::none) return kSm90CodeTiles[row];
        if (feature == Sm90Feature::beside) return kSm90TilesBeside;
        if (has_blocks()) return kSm90BlockTiles[block_row].tiles;
        return kSm90Tiles[row];
    }
    bool may_split() const { return num_splits > 0 || by_length; }
    bool has_blocks() const { return feature == Sm90Feature::blocks || feature == Sm90Feature::small_blocks; }
    Grid grid() const { return {num_ctas}; }
    int32_t threads() const { return 128 * (codes != Codes::none ? 4 : tiles().warpgroups + 1); }
    int64_t workspace_bytes() const { return partial_bytes + num_counters * int64_t{sizeof(uint32_t)}; }
};

// Returns nothing where the kernel does not serve; why_not, unless null, then gets the reason.
std::optional<Sm90Plan> plan_sm90_attention(const AttentionParams& params, const Gpu& gpu,
                                            std::string* why_not = nullptr);
// The same with row `row` of kSm90Tiles, over numbers in pages.
std::optional<Sm90Plan> plan_sm90_attention_with(const AttentionParams& params, const Gpu& gpu, int32_t row);
// The same for the instance of Sm90Feature::beside.
std::optional<Sm90Plan> plan_sm90_attention_beside(const AttentionParams& params, const Gpu& gpu);

Explanation describe(const Sm90Plan& plan);
inline bool operator==(const Sm90Plan& a, const Sm90Plan& b) { return describe(a).plan == describe(b).plan; }

std::vector<std::string> sm90_attention_instances();

}  // namespace octavo::cuda
