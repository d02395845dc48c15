#include "cuda/expand_codes/plan.h"

#include "cuda/cache_arrays.h"

#include <algorithm>
#include <cmath>

namespace octavo::cuda {
namespace {

constexpr int64_t kCtasOfAnSm = 32;  // an SM holds eight at a time
constexpr int64_t kAlignment = 256;  // bytes; parts of the workspace begin at multiples of it

// How many bytes the keys, or the values, of all sequences take.
int64_t tensor_bytes(const AttentionParams& p, int64_t room) {
    return ceil_divide(p.batch * room * p.num_kv_heads * p.head_dim * size_of(p.dtype), kAlignment) *
           kAlignment;
}

bool has_scales_of_tokens(const AttentionParams& p) {
    return has_token_scales(p) || p.k_dtype == DType::int4 || p.v_dtype == DType::int4;
}
// Whether there are scales of KV heads in memory; otherwise softmax_scale and out_scale include them.
bool has_scales_of_heads(const AttentionParams& p) {
    return !has_scales_of_tokens(p) && (p.k_scales.data || p.v_scales.data);
}

// How many rows of one KV head a key is multiplied by, on average over the keys that are converted: the work
// that is done once for a key has to pay by what it saves with every row.
int64_t rows_of_a_key(const AttentionParams& p) {
    const double rows = static_cast<double>(p.total_q) * p.group_size() / p.batch;
    const double queries = std::min(p.seqlen_q, p.seqlen_k);
    double keys = p.seqlen_k, seen = p.window_right >= 0 ? p.seqlen_k - queries / 2 : p.seqlen_k;
    if (p.window_left >= 0 && !p.prefix_lens) {
        keys = std::min(keys, p.window_left + queries);
        seen = std::min(seen, double{1} + p.window_left);
    }
    return std::llround(rows * seen / std::max(keys, 1.0));
}

// From this many rows on, this way is the faster one. To write and read a key takes as long as the products
// of some 300 rows: chunks of 512 over 8,192 tokens, which are 1,990 rows, have 0.81 to 0.93 of their speed
// over 16 bits in two runs on an H100. In return, no converters delay the products. Their delay is least over
// float8, where one instruction converts a pair of codes (0.88 to 0.93 there), and most where each key has a
// scale (0.69 to 0.76). Above head dim 128, the alternative is sm80_attention.
int64_t fewest_rows(const AttentionParams& p) {
    if (p.head_dim > kSm90CodeTiles[std::size(kSm90CodeTiles) - 1].head_dim) return 256;
    if (has_scales_of_tokens(p)) return 768;
    return 1536;
}

// Rounds a number of tokens up to whole tiles of keys, so that one copy brings a tile.
int32_t whole_tiles(int32_t tokens, int32_t tile_keys) {
    return static_cast<int32_t>(ceil_divide(tokens, tile_keys) * tile_keys);
}

std::string instance_name(DType dtype, Codes codes) {
    return text_of("expand_codes<", to_string(dtype), ", ", name_of(dtype, codes), ">");
}

}  // namespace

AttentionParams over_expanded(const AttentionParams& params, int32_t room, void* workspace) {
    AttentionParams p = params;
    char* const keys = static_cast<char*>(workspace);
    char* const values = keys + tensor_bytes(p, room);
    p.k = keys;
    p.v = values;
    p.k_dtype = p.v_dtype = p.dtype;
    p.k_scales = p.v_scales = {};
    p.k_token_stride = p.v_token_stride = p.head_dim;
    p.k_head_stride = p.v_head_stride = int64_t{room} * p.head_dim;
    p.k_outer_stride = p.v_outer_stride = p.num_kv_heads * p.k_head_stride;
    p.page_table = {reinterpret_cast<const int32_t*>(values + tensor_bytes(p, room))};
    p.page_table_stride = 1;
    p.page_size = room;
    p.num_pages = p.batch;
    return p;
}

std::optional<ExpandedPlan> make_expanded_plan(const AttentionParams& p, const Gpu& gpu,
                                               std::string* why_not) {
    const std::optional<Codes> codes = codes_of(p.k_dtype, p.v_dtype);
    if (!codes || *codes == Codes::none || !p.paged()) {
        return refuse(why_not, "it turns pages of codes into numbers, and keys are ", to_string(p.k_dtype),
                      ", values ", to_string(p.v_dtype));
    }
    if (p.batch_invariant) {
        return refuse(why_not,
                      "with batch_invariant the kernels that read codes serve alone: whether there is "
                      "workspace for numbers depends on the batch");
    }
    if (p.chosen_pages) return refuse(why_not, kReadsAllPages);
    if (!can_load_codes(p, why_not)) return std::nullopt;
    if (p.head_dim > kMaxCudaCodeHeadDim || p.head_dim % kExpandColumns != 0) {
        return refuse(why_not, "it takes eight codes at a time, and multiples of 8 up to ",
                      kMaxCudaCodeHeadDim, " as head_dim, not ", p.head_dim);
    }
    if (p.dtype == DType::float16 && has_scales_of_heads(p) &&
        p.head_dim <= kSm90CodeTiles[std::size(kSm90CodeTiles) - 1].head_dim) {
        return refuse(why_not,
                      "keys and values would be products with the scales of their heads, for which float16 "
                      "has less range than there is where the scales are left out of the numbers");
    }
    // The tile of every instance divides this.
    constexpr int32_t kAnyTile = 64 * 5 * 7 * 2;
    if (p.seqlen_k > INT32_MAX - kAnyTile || tensor_bytes(p, p.seqlen_k) > kMaxExpandedBytes / 2) {
        return refuse(why_not, "it takes up to ", kMaxExpandedBytes >> 20, " MB of workspace, and ",
                      counted(p.batch, "sequence"), " x ", p.seqlen_k, " tokens of room in page_table x ",
                      counted(p.num_kv_heads, "KV head"), " take ",
                      ceil_divide(2 * tensor_bytes(p, p.seqlen_k), 1 << 20));
    }
    auto attention_of = [&](int32_t room, std::string* why_not) {
        return plan_sm90_attention(over_expanded(p, room, kSomeWorkspace), gpu, why_not);
    };
    const auto any = attention_of(whole_tiles(p.seqlen_k, kAnyTile), why_not);
    if (!any) return std::nullopt;
    ExpandedPlan plan{};
    plan.room = whole_tiles(p.seqlen_k, any->tiles().keys);
    const auto attention = attention_of(plan.room, why_not);
    if (!attention) return std::nullopt;
    plan.attention = *attention;
    plan.dtype = p.dtype;
    plan.codes = *codes;
    plan.token_scales = has_scales_of_tokens(p);
    plan.num_sequences = p.batch;
    plan.num_kv_heads = p.num_kv_heads;
    plan.head_dim = p.head_dim;
    constexpr int32_t kLaneColumns = kExpandPasses * kExpandColumns;
    static_assert(kMaxCudaCodeHeadDim <= kManyExpandLanes * kLaneColumns);
    plan.lanes = p.head_dim <= kFewExpandLanes * kLaneColumns ? kFewExpandLanes : kManyExpandLanes;
    plan.num_runs = static_cast<int32_t>(ceil_divide(p.seqlen_k, plan.run_tokens()));
    // Most of the room may be empty, and CTAs for it would have nothing to do. As many CTAs as end together
    // are enough.
    const int64_t rows = int64_t{p.batch} * p.num_kv_heads;
    plan.num_turns =
        static_cast<int32_t>(std::min<int64_t>(plan.num_runs, ceil_divide(kCtasOfAnSm * gpu.num_sms, rows)));
    plan.tensor_bytes = tensor_bytes(p, plan.room);
    plan.table_bytes = p.batch * int64_t{sizeof(int32_t)};
    return plan;
}

std::optional<ExpandedPlan> plan_expanded_attention(const AttentionParams& p, const Gpu& gpu,
                                                    std::string* why_not) {
    // The cheapest test comes first, since calls of other kinds ask too.
    if (!is_code(p.k_dtype)) return refuse(why_not, "the pages hold numbers, not codes");
    const int64_t rows = rows_of_a_key(p), fewest = fewest_rows(p);
    if (rows < fewest) {
        return refuse(why_not, "to turn codes into numbers once pays if each key is multiplied by at least ",
                      fewest, " rows, and here these are ", rows, " on average");
    }
    return make_expanded_plan(p, gpu, why_not);
}

Explanation describe(const ExpandedPlan& plan) {
    const Explanation attention = describe(plan.attention);
    Explanation text;
    text.kernel = instance_name(plan.dtype, plan.codes);
    text.summary =
        text_of("expand_codes_kernel: ", counted(plan.num_sequences, "sequence"), " x ",
                counted(plan.num_kv_heads, "KV head"), " x ", counted(plan.num_turns, "CTA"), " for runs of ",
                plan.run_tokens(), " tokens: ", counted(plan.grid().size(), "CTA"), " of ", plan.threads(),
                " threads; then over the numbers ", attention.kernel, ": ", attention.summary);
    text.file = "src/cuda/expand_codes/expand_codes.cu";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"cache", name_of(plan.dtype, plan.codes)},
        {"token_scales", plan.token_scales},
        {"head_dim", plan.head_dim},
        {"num_kv_heads", plan.num_kv_heads},
        {"num_sequences", plan.num_sequences},
        {"room", plan.room},
        {"lanes", plan.lanes},
        {"num_runs", plan.num_runs},
        {"num_turns", plan.num_turns},
        {"num_ctas", plan.grid().size()},
        {"threads", plan.threads()},
        {"tensor_bytes", plan.tensor_bytes},
        {"table_bytes", plan.table_bytes},
        {"workspace_bytes", plan.workspace_bytes()},
        {"attention", attention.kernel},
    };
    return text;
}

std::vector<std::string> expand_codes_instances() {
    std::vector<std::string> names;
    for (DType dtype : kAttentionTypes) {
        for (Codes codes : kAllCodes) names.push_back(instance_name(dtype, codes));
    }
    return names;
}

}  // namespace octavo::cuda
