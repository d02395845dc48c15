// How the decode kernels would work through a batch with few rows per KV head. An item is one KV head of one
// sequence, a row is one query token of one query head, a block is 16 keys (of codes, 32). plan_text.cpp
// describes plans.
#pragma once

#include "cuda/decode/tiles.h"
#include "cuda/gpu.h"
#include "cuda/plan.h"
#include "params/attention_params.h"

#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace octavo::cuda {

// Which of the configurations in tiles.h a split-KV kernel has; by length, it has one of its own.
enum class SplitKvItems { long_items, short_items, many_items };

// split_kv_decode: the host says how many CTAs share an item.
struct SplitKvPlan {
    DType dtype;
    Codes codes;  // what pages hold; none: numbers of that dtype
    int32_t row;  // a row of kDecodeTiles; with dtype or codes, policy and items it names the instance
    int32_t block_keys;
    SplitPolicy policy;
    SplitKvItems items;
    int32_t num_sequences;          // the first sequences of the batch; another plan is made for the others
    int32_t num_kv_heads;           // group_parts for each of the call's
    int32_t group_parts;            // of the query heads of a KV head (with_group_parts)
    int32_t num_splits;             // the most CTAs that work on an item
    int32_t num_slots;              // CTAs that work on the items of a KV head
    int32_t combiners_per_item;     // CTAs that combine an item's splits; 0: its last split combines
    int32_t warps_per_row_log2;     // warps of a combiner that share a row, as a power of two
    int32_t max_fixed_splits_log2;  // SplitPolicy::fixed: see FixedSplits
    int32_t max_visible_blocks;     // the most that queries of a sequence see; a window may bound it
    int32_t blocks_per_split;       // SplitPolicy::sized
    bool has_chosen_pages;          // chosen pages have instances of their own
    bool length_first;      // whether CTAs look at the length before all else, as most may have nothing to do
    int32_t partial_words;  // the length of the partial result of a split
    int32_t threads;

    const DecodeTiles& tiles() const { return kDecodeTiles[row]; }
    Grid grid() const;
    int64_t workspace_words() const { return int64_t{num_kv_heads} * num_slots * partial_words; }
    int64_t workspace_bytes() const { return workspace_words() * int64_t{sizeof(uint32_t)}; }
};

// stream_k_decode: the CTAs divide the blocks of the batch among themselves, on the device.
struct StreamKPlan {
    DType dtype;
    Codes codes;  // what pages hold; none: numbers of that dtype
    int32_t row;  // a row of kDecodeTiles; with dtype or codes it names the instance
    int32_t block_keys;
    int32_t num_sequences, num_kv_heads, group_parts;
    int32_t num_ctas, threads;
    int32_t partial_words;  // the length of the partial result of a CTA

    const DecodeTiles& tiles() const { return kDecodeTiles[row]; }
    Grid grid() const { return {num_ctas}; }
    int64_t workspace_words() const { return int64_t{num_ctas} * partial_words; }
    int64_t workspace_bytes() const { return workspace_words() * int64_t{sizeof(uint32_t)}; }
};

using DecodePlan = std::variant<SplitKvPlan, StreamKPlan>;

// Returns nothing where the kernel does not serve; why_not, unless null, then gets the reason.
std::optional<SplitKvPlan> plan_split_kv(const AttentionParams& params, const Gpu& gpu,
                                         std::string* why_not = nullptr);
std::optional<StreamKPlan> plan_stream_k(const AttentionParams& params, const Gpu& gpu,
                                         std::string* why_not = nullptr);
// The plan of whichever kernel works through all sequences of the batch in one launch, or through those of
// them that `params` says a launch serves.
std::optional<DecodePlan> plan_decode_at_once(const AttentionParams& params, const Gpu& gpu,
                                              std::string* why_not = nullptr);

// The call whose query heads of a KV head are divided into parts, each with a KV head that reads the same
// keys: above head dim 128 no kernel over codes takes more than eight rows of a KV head. Its pages still have
// heads of their own number (CodeLayout).
inline AttentionParams with_group_parts(AttentionParams params, int32_t parts) {
    params.num_kv_heads *= parts;
    return params;
}

Explanation describe(const SplitKvPlan& plan);
Explanation describe(const StreamKPlan& plan);
inline Explanation describe(const DecodePlan& plan) {
    return std::visit([](const auto& plan) { return describe(plan); }, plan);
}
inline bool operator==(const SplitKvPlan& a, const SplitKvPlan& b) {
    return describe(a).plan == describe(b).plan;
}
inline bool operator==(const StreamKPlan& a, const StreamKPlan& b) {
    return describe(a).plan == describe(b).plan;
}

std::vector<std::string> decode_instances();

}  // namespace octavo::cuda
