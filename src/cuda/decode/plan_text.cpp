// How explain() describes the plans of the decode kernels, and the names of their instances.
#include "cuda/decode/plan.h"

namespace octavo::cuda {
namespace {

const char* name_of(SplitPolicy policy) {
    switch (policy) {
        case SplitPolicy::even: break;
        case SplitPolicy::by_length: return "by_length";
        case SplitPolicy::sized: return "sized";
        case SplitPolicy::fixed: return "fixed";
    }
    return "even";
}

const char* name_of(SplitKvItems items) {
    switch (items) {
        case SplitKvItems::long_items: break;
        case SplitKvItems::short_items: return "short";
        case SplitKvItems::many_items: return "many";
    }
    return "long";
}

std::string name_of(const char* kernel, DType dtype, Codes codes, const DecodeTiles& tiles) {
    return text_of(kernel, "<", name_of(dtype, codes), ", head_dim ", tiles.head_dim, ", ", tiles.rows(),
                   " rows>");
}

// "64 CTAs of 256 threads"
std::string ctas_of(const Grid& grid, int32_t threads) {
    return text_of(counted(grid.size(), "CTA"), " of ", threads, " threads");
}

}  // namespace

Explanation describe(const SplitKvPlan& plan) {
    Explanation text;
    text.kernel = name_of("split_kv_decode", plan.dtype, plan.codes, plan.tiles());
    text.summary = text_of(text_of_heads(plan.num_kv_heads / plan.group_parts, plan.group_parts), " x ",
                           counted(plan.num_sequences, "sequence"), " x ");
    if (plan.policy == SplitPolicy::by_length) {
        text.summary += text_of("1 to ", counted(plan.num_splits, "split"), " by length, in ",
                                counted(plan.num_slots, "slot"), " a KV head");
    } else {
        const char* const at_most = plan.policy != SplitPolicy::even && plan.num_splits > 1 ? "up to " : "";
        text.summary += text_of(at_most, counted(plan.num_splits, "split"));
    }
    if (plan.policy == SplitPolicy::sized)
        text.summary +=
            text_of(" of ", counted(plan.blocks_per_split, "block"), " of ", plan.block_keys, " keys");
    if (plan.has_chosen_pages) text.summary += " of chosen pages";
    if (plan.combiners_per_item > 0) {
        text.summary += text_of(", and ", counted(plan.combiners_per_item, "combiner"), " per item");
    } else if (plan.num_splits > 1) {
        text.summary += "; the last split of an item combines them";
    }
    text.summary += ": " + ctas_of(plan.grid(), plan.threads);
    text.file = "src/cuda/decode/split_kv.cuh";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"cache", name_of(plan.dtype, plan.codes)},
        {"head_dim", plan.tiles().head_dim},
        {"rows", plan.tiles().rows()},
        {"policy", name_of(plan.policy)},
        {"items", name_of(plan.items)},
        {"num_sequences", plan.num_sequences},
        {"num_kv_heads", plan.num_kv_heads},
        {"group_parts", plan.group_parts},
        {"num_splits", plan.num_splits},
        {"num_slots", plan.num_slots},
        {"combiners_per_item", plan.combiners_per_item},
        {"warps_per_row", 1 << plan.warps_per_row_log2},
        {"max_fixed_splits", 1 << plan.max_fixed_splits_log2},
        {"max_visible_blocks", plan.max_visible_blocks},
        {"blocks_per_split", plan.blocks_per_split},
        {"length_first", plan.length_first},
        {"num_ctas", plan.grid().size()},
        {"threads", plan.threads},
        {"workspace_bytes", plan.workspace_bytes()},
    };
    if (plan.has_chosen_pages) text.plan.emplace_back("chosen_pages", true);
    return text;
}

Explanation describe(const StreamKPlan& plan) {
    Explanation text;
    text.kernel = name_of("stream_k_decode", plan.dtype, plan.codes, plan.tiles());
    text.summary =
        text_of(text_of_heads(plan.num_kv_heads / plan.group_parts, plan.group_parts), " x ",
                counted(plan.num_sequences, "sequence"), ", blocks of ", plan.block_keys,
                " keys, of which the device gives each CTA its run: ", ctas_of(plan.grid(), plan.threads));
    text.file = "src/cuda/decode/stream_k.cuh";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"cache", name_of(plan.dtype, plan.codes)},
        {"head_dim", plan.tiles().head_dim},
        {"rows", plan.tiles().rows()},
        {"num_sequences", plan.num_sequences},
        {"num_kv_heads", plan.num_kv_heads},
        {"group_parts", plan.group_parts},
        {"num_ctas", plan.num_ctas},
        {"threads", plan.threads},
        {"workspace_bytes", plan.workspace_bytes()},
    };
    return text;
}

std::vector<std::string> decode_instances() {
    std::vector<std::string> names;
    for (const char* kernel : {"split_kv_decode", "stream_k_decode"}) {
        for (const DecodeTiles& tiles : kDecodeTiles) {
            for (DType dtype : kAttentionTypes) names.push_back(name_of(kernel, dtype, Codes::none, tiles));
            if (!tiles.has_codes) continue;
            for (Codes codes : kAllCodes) names.push_back(name_of(kernel, DType{}, codes, tiles));
        }
    }
    return names;
}

}  // namespace octavo::cuda
