#include "cuda/expand_codes/plan.h"

#include "cuda/cache_arrays.h"

#include <algorithm>
#include <cmath>

namespace octavo::cuda {
namespace {

constexpr int64_t kCtasOfAnSm = 32;  // an SM holds eight at a time
constexpr int64_t kAlignment = 256;  // bytes; parts of the workspace begin at multiples of it
// sm90_attention reads codes up to this head dim.
constexpr int32_t kMostConvertedHeadDim = kSm90CodeTiles[std::size(kSm90CodeTiles) - 1].head_dim;
constexpr int32_t kDecodeRows = 8;  // its kernels for 16 rows have half the warps, which wait longer

// How many bytes the keys, or the values, of so many slots take.
int64_t tensor_bytes(const AttentionParams& p, int64_t num_slots, int64_t room) {
    return ceil_divide(num_slots * room * p.num_kv_heads * p.head_dim * size_of(p.dtype), kAlignment) *
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
// scale (0.69 to 0.76). Above head dim 128, and with bidirectional ranges, the alternative is sm80_attention.
int64_t fewest_rows(const AttentionParams& p) {
    if (p.ranges || p.head_dim > kMostConvertedHeadDim) return 256;
    if (has_scales_of_tokens(p)) return 768;
    return 1536;
}

// How many sequences have room in the workspace.
int64_t most_slots(const AttentionParams& p) {
    return kMaxExpandedBytes / std::max<int64_t>(2 * tensor_bytes(p, 1, p.seqlen_k), 1);
}

// From how many queries on a sequence's codes become numbers, where others keep theirs. As many such
// sequences as there may be must have room.
int32_t fewest_converted_queries(const AttentionParams& p) {
    int64_t fewest = ceil_divide(fewest_rows(p), p.group_size());
    if (p.batch > most_slots(p)) fewest = std::max(fewest, p.total_q / (most_slots(p) + 1) + 1);
    return static_cast<int32_t>(std::min<int64_t>(fewest, INT32_MAX));
}

// Whether the longest sequence of a packed batch has enough queries that its codes should become numbers,
// while the others have far fewer in the mean, as where sequences decode beside chunks of prompts. (This
// takes max_seqlen_q for the length of the longest. Where that bounds nothing, and there are rows and room
// enough for all sequences to become numbers, they do: parts without sequences would cost launches.) One
// launch over codes is too slow then: 60 sequences of 2,048 tokens that decode beside four chunks of 512 over
// 4,096, 32/8 heads of 128, took 373 (fp8) to 481 us (int8 with int4) on an H100, 356 and 351 in parts, and
// 331 to 342 over bfloat16.
bool is_mixed_batch(const AttentionParams& p) {
    if (!p.cu_seqlens_q || p.batch < 2 || p.seqlen_q < fewest_converted_queries(p)) return false;
    int64_t seen = p.seqlen_q;
    if (p.window_left >= 0 && !p.prefix_lens) seen = std::min<int64_t>(seen, int64_t{1} + p.window_left);
    if (seen * p.group_size() < fewest_rows(p)) return false;
    if (p.seqlen_q >= p.total_q && p.batch <= most_slots(p) && rows_of_a_key(p) >= fewest_rows(p))
        return false;
    const double others = static_cast<double>(p.total_q - p.seqlen_q) / (p.batch - 1);
    return 2 * others < p.seqlen_q;
}

// Rounds a number of tokens up to whole tiles of keys, so that one copy brings a tile.
int32_t whole_tiles(int32_t tokens, int32_t tile_keys) {
    return static_cast<int32_t>(ceil_divide(tokens, tile_keys) * tile_keys);
}

Explanation describe_between(const ExpandedPlan& plan) {
    return std::visit([](const auto& plan) { return describe(plan); }, *plan.between);
}

std::string instance_name(DType dtype, Codes codes) {
    return text_of("expand_codes<", to_string(dtype), ", ", name_of(dtype, codes), ">");
}

// How many SMs attention over the numbers should leave to the sequences of a mixed batch that decode, and
// roughly how long both take then, in microseconds.
struct SmsLeft {
    int32_t sms;
    double us;
};

// Those that decode wait for memory, while the other SMs multiply. Row tiles are long, and come in rounds of
// one an SM; so this weighs numbers of rounds against each other, and leaves the SMs that the best one does
// not need. What still has to be decoded behind the last round has all SMs, and memory bounds it.
SmsLeft choose_sms_left(const AttentionParams& p, const Gpu& gpu, const Sm90Plan& attention) {
    // What an SM does in a microsecond: flops, fewer where two consumers share K and V and not three, bytes
    // of codes, and keys of one head.
    const double flops = attention.tiles().warpgroups == 2 ? 4e6 : 4.5e6;
    constexpr double kBytes = 45e3, kKeys = 220;
    // The host knows no lengths. It takes as many sequences for long as there may be beside others of one
    // query, and these for half as long as the table has room for: if they are shorter, SMs will lack work.
    const double queries = p.seqlen_q;
    const double many =
        std::clamp<double>(std::round(static_cast<double>(p.total_q - p.batch) / (queries - 1)), 1, p.batch);
    const double keys = (p.batch - many) * p.num_kv_heads * p.seqlen_k / 2;  // to be decoded
    const double bytes = keys * p.head_dim * (bits_of(p.k_dtype) + bits_of(p.v_dtype)) / 8;
    const double sm_us = std::max(bytes / kBytes, keys / kKeys);
    const double read_us = bytes / (0.7e3 * gpu.memory_gb_per_s);
    const int64_t tile_tokens = int64_t{attention.tiles().row_blocks()} * attention.tokens;
    const auto row_tiles =
        static_cast<int64_t>(many) * ceil_divide(p.seqlen_q, tile_tokens) * (p.num_q_heads / attention.heads);
    const double round_us =
        4.0 * kSm90GroupRows * attention.tiles().row_blocks() * p.head_dim * p.seqlen_k / flops;
    const int64_t sms = attention.num_ctas, least = ceil_divide(row_tiles, sms);
    SmsLeft best{0, static_cast<double>(least) * round_us + read_us};
    for (int64_t rounds = least; static_cast<double>(rounds) * round_us < best.us; ++rounds) {
        const int64_t left = sms - ceil_divide(row_tiles, rounds);
        const double time = static_cast<double>(rounds) * round_us;
        const double rest = std::max(1.0 - static_cast<double>(left) * time / sm_us, 0.0);
        if (left == 0 || time + rest * read_us >= best.us) continue;
        best = {static_cast<int32_t>(left), time + rest * read_us};
    }
    return best;
}

// Makes the plan of the sequences with at least many_queries queries, of which there are num_slots at most;
// 0: of all. `row`: the row of kSm90Tiles for attention over the numbers, if it is given.
std::optional<ExpandedPlan> make_plan(const AttentionParams& p, const Gpu& gpu, int32_t many_queries,
                                      int32_t num_slots, std::string* why_not,
                                      std::optional<int32_t> row = {}) {
    const std::optional<Codes> codes = codes_of(p.k_dtype, p.v_dtype);
    if (!codes || *codes == Codes::none || !p.paged()) {
        return refuse(why_not, "it turns pages of codes into numbers, and keys are ", to_string(p.k_dtype),
                      ", values ", to_string(p.v_dtype));
    }
    if (p.head_dim_v != p.head_dim) {
        return refuse(why_not, "it takes keys and values of one head_dim, and these have ", p.head_dim,
                      " and ", p.head_dim_v);
    }
    if (p.batch_invariant) {
        return refuse(why_not,
                      "with batch_invariant the kernels that read codes serve alone: whether there is "
                      "workspace for numbers depends on the batch");
    }
    if (p.chosen_pages) return refuse(why_not, kReadsAllPages);
    if (p.ranges && p.window_left >= 0 && !p.ranges.keep_window_left) {
        return refuse(why_not,
                      "it leaves out keys before the windows of all queries, and bidirectional_ranges may "
                      "show some of them");
    }
    if (!can_load_codes(p, why_not)) return std::nullopt;
    if (p.head_dim > kMaxCudaCodeHeadDim || p.head_dim % kExpandColumns != 0) {
        return refuse(why_not, "it takes eight codes at a time, and multiples of 8 up to ",
                      kMaxCudaCodeHeadDim, " as head_dim, not ", p.head_dim);
    }
    if (p.dtype == DType::float16 && has_scales_of_heads(p) && p.head_dim <= kMostConvertedHeadDim) {
        return refuse(why_not,
                      "keys and values would be products with the scales of their heads, for which float16 "
                      "has less range than there is where the scales are left out of the numbers");
    }
    if (tensor_bytes(p, num_slots, p.seqlen_k) > kMaxExpandedBytes / 2) {
        return refuse(why_not, "it takes up to ", kMaxExpandedBytes >> 20, " MB of workspace, and ",
                      counted(num_slots, "sequence"), " x ", p.seqlen_k, " tokens of room in page_table x ",
                      counted(p.num_kv_heads, "KV head"), " take ",
                      ceil_divide(2 * tensor_bytes(p, num_slots, p.seqlen_k), 1 << 20));
    }
    auto attention_of = [&](int32_t room, std::string* why_not) {
        AttentionParams over_numbers = over_expanded(p, num_slots, room, kSomeWorkspace);
        over_numbers.batch = num_slots;  // others have no row tile
        if (row) return plan_sm90_attention_with(over_numbers, gpu, *row);
        return plan_sm90_attention(over_numbers, gpu, why_not);
    };
    constexpr int32_t kAnyTile = 64 * 5 * 7 * 2;  // which the tile of every instance divides
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
    plan.many_queries = many_queries;
    plan.num_slots = num_slots;
    plan.num_kv_heads = p.num_kv_heads;
    plan.head_dim = p.head_dim;
    constexpr int32_t kLaneColumns = kExpandPasses * kExpandColumns;
    static_assert(kMaxCudaCodeHeadDim <= kManyExpandLanes * kLaneColumns);
    plan.lanes = p.head_dim <= kFewExpandLanes * kLaneColumns ? kFewExpandLanes : kManyExpandLanes;
    plan.num_runs = static_cast<int32_t>(ceil_divide(p.seqlen_k, plan.run_tokens()));
    // Most of the room may be empty, and CTAs for it would have nothing to do. As many CTAs as end together
    // are enough.
    const int64_t rows = int64_t{num_slots} * p.num_kv_heads;
    plan.num_turns =
        static_cast<int32_t>(std::min<int64_t>(plan.num_runs, ceil_divide(kCtasOfAnSm * gpu.num_sms, rows)));
    plan.tensor_bytes = tensor_bytes(p, num_slots, plan.room);
    plan.table_bytes = p.batch * int64_t{sizeof(int32_t)};
    if (plan.workspace_bytes() > kMaxExpandedBytes + kMaxRoundingBytes) {
        return refuse(why_not, "it takes up to ", (kMaxExpandedBytes + kMaxRoundingBytes) >> 20,
                      " MB of workspace where the room in page_table is rounded up to whole tiles, and ",
                      counted(num_slots, "sequence"), " x ", plan.room, " tokens x ",
                      counted(p.num_kv_heads, "KV head"), " take ",
                      ceil_divide(plan.workspace_bytes(), 1 << 20));
    }
    return plan;
}

}  // namespace

AttentionParams with_queries(AttentionParams p, int32_t fewest, int32_t most) {
    p.fewest_queries = fewest;
    p.most_queries = most;
    p.seqlen_q = std::min(p.seqlen_q, most);
    return p;
}

AttentionParams over_expanded(const AttentionParams& params, int32_t num_slots, int32_t room,
                              void* workspace) {
    AttentionParams p = params;
    char* const keys = static_cast<char*>(workspace);
    char* const values = keys + tensor_bytes(p, num_slots, room);
    p.k = keys;
    p.v = values;
    p.k_dtype = p.v_dtype = p.dtype;
    p.k_scales = p.v_scales = {};
    p.k_token_stride = p.v_token_stride = p.head_dim;
    p.k_head_stride = p.v_head_stride = int64_t{room} * p.head_dim;
    p.k_outer_stride = p.v_outer_stride = p.num_kv_heads * p.k_head_stride;
    p.page_table = {reinterpret_cast<const int32_t*>(values + tensor_bytes(p, num_slots, room))};
    p.page_table_stride = 1;
    p.page_size = room;
    p.num_pages = num_slots;
    p.static_past = false;  // the launch in front writes these
    return p;
}

std::optional<ExpandedPlan> make_expanded_plan(const AttentionParams& p, const Gpu& gpu,
                                               std::string* why_not) {
    AttentionParams served = p;
    // Up to head dim 128 other kernels over codes take less time than launches one after the other.
    if (p.head_dim > kMostConvertedHeadDim)
        served.batch = static_cast<int32_t>(std::clamp<int64_t>(most_slots(p), 1, p.batch));
    return make_plan(served, gpu, 0, served.batch, why_not);
}

std::optional<ExpandedPlan> make_mixed_plan(const AttentionParams& p, const Gpu& gpu, int32_t many_queries,
                                            std::string* why_not) {
    if (!p.cu_seqlens_q) return refuse(why_not, "all sequences have equally many queries");
    if (many_queries < 2)
        return refuse(why_not, "sequences of one query decode, and many_queries is ", many_queries);
    const auto num_slots = static_cast<int32_t>(std::min<int64_t>(p.batch, p.total_q / many_queries));
    if (num_slots == 0) {
        return refuse(why_not, "no sequence can have ", many_queries, " queries, where ", p.total_q,
                      " are in all");
    }
    std::optional<DecodePlan> few;
    int32_t few_queries = std::min(std::max(kDecodeRows / p.group_size(), 1), many_queries - 1);
    for (; few_queries > 0; few_queries /= 2) {
        few = plan_decode_at_once(with_queries(p, 1, few_queries), gpu, why_not);
        if (few) break;
    }
    if (!few) return std::nullopt;
    std::optional<ExpandedPlan> plan = make_plan(p, gpu, many_queries, num_slots, why_not);
    if (!plan) return std::nullopt;
    if (std::holds_alternative<SplitKvPlan>(*few)) {
        SmsLeft left = choose_sms_left(p, gpu, plan->attention);
        // The row tiles were chosen for as many long sequences as there may be, and there are likely fewer.
        const Sm90Tiles& chosen = kSm90Tiles[plan->attention.row];
        for (int32_t row = 0; row < static_cast<int32_t>(std::size(kSm90Tiles)); ++row) {
            const Sm90Tiles& tiles = kSm90Tiles[row];
            if (&tiles == &chosen || tiles.head_dim != chosen.head_dim || tiles.value_dim != chosen.value_dim)
                continue;
            const auto other = make_plan(p, gpu, many_queries, num_slots, nullptr, row);
            if (!other) continue;
            const SmsLeft of_other = choose_sms_left(p, gpu, other->attention);
            if (of_other.us >= left.us) continue;
            plan = other;
            left = of_other;
        }
        plan->sms_left = left.sms;
        plan->attention.num_ctas -= left.sms;
    }
    plan->few = few;
    plan->few_queries = few_queries;
    AttentionParams between = with_queries(p, few_queries + 1, many_queries - 1);
    if (p.head_dim > kMostConvertedHeadDim) {
        between.num_splits = 1;  // what combines splits would write the rows of other launches, too
        plan->between = plan_sm80_attention(between, gpu);
        return plan;
    }
    const auto sm90 = plan_sm90_attention(between, gpu, why_not);
    if (!sm90) return std::nullopt;
    plan->between = *sm90;
    return plan;
}

std::optional<ExpandedPlan> plan_expanded_attention(const AttentionParams& p, const Gpu& gpu,
                                                    std::string* why_not) {
    // The cheapest test comes first, since calls of other kinds ask too.
    if (!is_code(p.k_dtype)) return refuse(why_not, "the pages hold numbers, not codes");
    std::string mixed;  // why the batch is not served as a mixed one
    if (is_mixed_batch(p)) {
        if (auto plan = make_mixed_plan(p, gpu, fewest_converted_queries(p), why_not ? &mixed : nullptr))
            return plan;
        if (why_not) mixed = "; not for its long sequences alone, as " + mixed;
    }
    const int64_t rows = rows_of_a_key(p), fewest = fewest_rows(p);
    if (rows < fewest) {
        return refuse(why_not, "to turn codes into numbers once pays if each key is multiplied by at least ",
                      fewest, " rows, and here these are ", rows, " on average", mixed);
    }
    return make_expanded_plan(p, gpu, why_not);
}

Explanation describe(const ExpandedPlan& plan) {
    const Explanation attention = describe(plan.attention);
    Explanation text;
    text.kernel = instance_name(plan.dtype, plan.codes);
    text.summary =
        text_of("expand_codes_kernel: ", plan.is_mixed() ? "up to " : "", counted(plan.num_slots, "sequence"),
                plan.is_mixed() ? text_of(" of at least ", plan.many_queries, " queries") : "", " x ",
                counted(plan.num_kv_heads, "KV head"), " x ", counted(plan.num_turns, "CTA"), " for runs of ",
                plan.run_tokens(), " tokens: ", counted(plan.grid().size(), "CTA"), " of ", plan.threads(),
                " threads; then over the numbers ", attention.kernel, ": ", attention.summary);
    if (plan.is_mixed()) {
        const Explanation few = describe(*plan.few), between = describe_between(plan);
        text.summary += text_of(
            plan.sms_left > 0 ? text_of("; on ", counted(plan.sms_left, "SM"), " beside it")
                              : std::string("; then"),
            " over the codes of sequences of up to ", counted(plan.few_queries, "query token"), " ",
            few.kernel, ": ", few.summary, "; then of the others ", between.kernel, ": ", between.summary);
    }
    text.file = "src/cuda/expand_codes/expand_codes.cu";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"cache", name_of(plan.dtype, plan.codes)},
        {"token_scales", plan.token_scales},
        {"head_dim", plan.head_dim},
        {"num_kv_heads", plan.num_kv_heads},
        {"num_sequences", plan.num_sequences},
        {"many_queries", plan.many_queries},
        {"few_queries", plan.few_queries},
        {"num_slots", plan.num_slots},
        {"sms_left", plan.sms_left},
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
        {"few", plan.is_mixed() ? describe(*plan.few).kernel : ""},
        {"between", plan.is_mixed() ? describe_between(plan).kernel : ""},
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
