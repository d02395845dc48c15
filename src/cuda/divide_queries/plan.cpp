#include "cuda/divide_queries/plan.h"

#include "cuda/cache_arrays.h"
#include "cuda/codes.h"

#include <algorithm>
#include <utility>

namespace octavo::cuda {
namespace {

int32_t larger_head_dim(const AttentionParams& p) { return std::max(p.head_dim, p.head_dim_v); }

// The most rows of a KV head that a decode kernel over codes takes.
int32_t most_rows(const AttentionParams& p) {
    int32_t rows = 0;
    for (const DecodeTiles& tiles : kDecodeTiles) {
        if (tiles.has_codes && tiles.head_dim >= larger_head_dim(p)) rows = std::max(rows, tiles.rows());
    }
    return rows;
}

// Columns of page_table that a sequence may need.
int32_t max_pages(const AttentionParams& p) {
    return static_cast<int32_t>(ceil_divide(p.seqlen_k, p.page_size));
}

int64_t bytes_for(int64_t num_parts, int64_t max_pages) {
    return (num_parts * (2 + max_pages) + 1) * int64_t{sizeof(int32_t)};
}

// Whether it pays to read and multiply a key once for each of two parts, instead of converting it once for
// all rows, as sm90_attention does. Its converters take the longer the more instructions a code has. Where
// these are few, it pays while parts find SMs without work, or where an item has one split: CTAs of two parts
// then read the same keys at the same time. (8 queries, 32/8 heads of 128, H100, microseconds before and in
// parts: float8 with static scales 16 x 4096 tokens 65 and 60, 32 x 4096 121 and 128, 128 x 2048 239 and 229;
// int8 with scales of tokens 76 and 57, 140 and 134, 300 and 263, but 64 x 4096 280 and 299.)
bool two_parts_pay(const AttentionParams& p, const Gpu& gpu, const DividedPlan& plan, std::string* why_not) {
    if (p.k_dtype == DType::int4 || p.v_dtype == DType::int4) return true;
    const auto* const split_kv = std::get_if<SplitKvPlan>(&plan.decode);
    const int32_t rounds = p.k_dtype == DType::int8 || has_token_scales(p) ? 2 : 1;
    const int64_t items = int64_t{p.batch} * p.num_kv_heads, most = int64_t{rounds} * gpu.num_sms;
    if (items <= most || (split_kv && split_kv->num_splits == 1)) return true;
    refuse(why_not, "over ", to_string(p.k_dtype), has_token_scales(p) ? "" : " with static scales",
           ", where items are split, it pays for up to ", most, " KV heads of sequences, and these are ",
           items);
    return false;
}

}  // namespace

int64_t DividedPlan::workspace_bytes() const { return bytes_for(int64_t{num_sequences} * parts, max_pages); }

AttentionParams over_parts(const AttentionParams& params, int32_t parts, int32_t part_queries,
                           void* workspace) {
    AttentionParams p = params;
    p.batch *= parts;
    p.seqlen_q = part_queries;
    auto* const numbers = static_cast<const int32_t*>(workspace);
    p.seq_lens = {numbers};
    p.cu_seqlens_q = {numbers + p.batch};
    p.page_table = {numbers + 2 * p.batch + 1};
    p.page_table_stride = max_pages(p);
    p.static_past = false;  // the launch in front writes these
    return p;
}

std::optional<DividedPlan> make_divided_plan(const AttentionParams& p, const Gpu& gpu, std::string* why_not) {
    const std::optional<Codes> codes = codes_of(p.k_dtype, p.v_dtype);
    if (!codes || *codes == Codes::none || !p.paged() || !p.seq_lens)
        return refuse(why_not, "it divides the queries of sequences whose pages hold codes");
    if (!p.cu_seqlens_q) return refuse(why_not, "it takes packed queries, and cu_seqlens_q is not given");
    if (p.batch_invariant) {
        return refuse(why_not,
                      "with batch_invariant the kernels that take all queries at once serve alone: whether "
                      "parts pay depends on the batch");
    }
    if (p.window_right != 0)
        return refuse(why_not, "a part ends with its last query's own key, and the call is not causal");
    if (p.has_tree_mask) {
        return refuse(why_not,
                      "a word of tree_mask has a bit for each of a sequence's queries, and parts have some");
    }
    if (p.chosen_pages) return refuse(why_not, "each sequence has chosen_pages of its own");
    if (p.prefix_lens)
        return refuse(why_not, "with prefix_lens a query may see keys past the last query of its part");
    if (p.alibi_slopes && p.alibi_batch_stride != 0)
        return refuse(why_not, "each sequence has alibi_slopes of its own");
    const int32_t group_size = p.group_size(), rows = most_rows(p);
    if (group_size > rows) {
        return refuse(why_not, "its decode kernel takes up to ", rows,
                      " rows per KV head, and one query token has ", group_size);
    }
    DividedPlan plan{};
    const int64_t parts = ceil_divide(p.seqlen_q, rows / group_size);
    if (parts < 2 || parts > kMostParts) {
        return refuse(why_not, "it makes from 2 to ", kMostParts, " parts of a sequence, and ",
                      counted(p.seqlen_q, "query token"), " of ", counted(group_size, "query head"), " make ",
                      counted(parts, "part"), " of up to ", rows, " rows");
    }
    plan.parts = static_cast<int32_t>(parts);
    plan.part_queries = static_cast<int32_t>(ceil_divide(p.seqlen_q, parts));
    plan.max_pages = max_pages(p);
    const int64_t bytes_of_one = bytes_for(parts, plan.max_pages);
    if (bytes_of_one > kMaxDividedBytes) {
        return refuse(why_not, "it takes up to ", kMaxDividedBytes >> 20, " MB of workspace, and ",
                      plan.parts, " copies of a row of page_table take ", ceil_divide(bytes_of_one, 1 << 20));
    }
    plan.num_sequences = static_cast<int32_t>(
        std::min<int64_t>({p.batch, kMaxDecodeBatch / plan.parts, kMaxDividedBytes / bytes_of_one}));
    AttentionParams served = p;
    served.batch = plan.num_sequences;
    const AttentionParams parts_of = over_parts(served, plan.parts, plan.part_queries, kSomeWorkspace);
    const auto decode = plan_decode_at_once(parts_of, gpu, why_not);
    if (!decode) return std::nullopt;
    plan.decode = *decode;
    return plan;
}

std::optional<DividedPlan> plan_divided_queries(const AttentionParams& p, const Gpu& gpu,
                                                std::string* why_not) {
    // The cheapest test comes first, since calls of other kinds ask too.
    if (!is_code(p.k_dtype)) return refuse(why_not, "the pages hold numbers, not codes");
    auto plan = make_divided_plan(p, gpu, why_not);
    // What sm90_attention over codes does not serve would run in sm80_attention, which takes 8 to 12 times as
    // long (16 sequences of 16 rows over 4096 tokens, head dim 256, an H100).
    constexpr int32_t kMostConvertedHeadDim = 128;
    if (!plan || larger_head_dim(p) > kMostConvertedHeadDim || p.head_dim != p.head_dim_v) return plan;
    if (plan->parts > 2) {
        return refuse(why_not, "up to head dim ", kMostConvertedHeadDim,
                      " more than two parts do not pay, and ", counted(p.seqlen_q, "query token"), " make ",
                      plan->parts);
    }
    if (!two_parts_pay(p, gpu, *plan, why_not)) return std::nullopt;
    return plan;
}

Explanation describe(const DividedPlan& plan) {
    const Explanation decode = describe(plan.decode);
    const auto [dtype, codes] =
        std::visit([](const auto& decode) { return std::pair(decode.dtype, decode.codes); }, plan.decode);
    Explanation text;
    text.kernel = "divide_queries";
    text.summary = text_of("divide_queries_kernel: ", counted(plan.grid().size(), "CTA"), " of ",
                           plan.threads(), " threads, which make ", plan.parts, " parts of up to ",
                           counted(plan.part_queries, "query token"),
                           " of each sequence; then over these parts ", decode.kernel, ": ", decode.summary);
    text.file = "src/cuda/divide_queries/divide_queries.cu";
    text.plan = {
        {"dtype", to_string(dtype)},
        {"cache", name_of(dtype, codes)},
        {"num_sequences", plan.num_sequences},
        {"parts", plan.parts},
        {"part_queries", plan.part_queries},
        {"max_pages", plan.max_pages},
        {"num_ctas", plan.grid().size()},
        {"threads", plan.threads()},
        {"workspace_bytes", plan.workspace_bytes()},
        {"decode", decode.kernel},
    };
    return text;
}

}  // namespace octavo::cuda
