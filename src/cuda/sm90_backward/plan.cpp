#include "cuda/sm90_backward/plan.h"

#include "cuda/alignment.h"
#include "cuda/attention_backward/group_parts.h"
#include "cuda/attention_backward/sink_terms.h"
#include "cuda/attention_backward/slope_parts.h"
#include "cuda/sm90_attention/operands.h"
#include "cuda/sm90_attention/tiles.h"
#include "cuda/sm90_backward/turns.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace octavo::cuda {
namespace {

constexpr int64_t kMaxIndex = int64_t{1} << 30;

const char* to_string(Sm90BackwardFeature feature) {
    switch (feature) {
        case Sm90BackwardFeature::none: return "none";
        case Sm90BackwardFeature::alibi: return "alibi";
        case Sm90BackwardFeature::symmetric_alibi: return "symmetric_alibi";
        case Sm90BackwardFeature::softcap: return "softcap";
        case Sm90BackwardFeature::dropout: return "dropout";
        case Sm90BackwardFeature::blocks: return "blocks";
        case Sm90BackwardFeature::ordered: return "ordered";
    }
    return "";
}

std::string name_of(DType dtype, const Sm90BackwardTiles& tiles, Sm90BackwardFeature feature) {
    std::string name = text_of("sm90_backward<", to_string(dtype), ", head_dim ", tiles.head_dim);
    if (tiles.dq_apart() || feature == Sm90BackwardFeature::ordered) name += ", deterministic";
    if (feature != Sm90BackwardFeature::none) name += text_of(", ", to_string(feature));
    return name + ">";
}

// The first row that serves; the last serves every call without a feature. -1: no row has the feature. Each
// block of columns has some of either head dim, since no box may lie outside an array altogether (ptx/tma.h).
int32_t find_tiles(const AttentionBackwardParams& p, bool deterministic, Sm90BackwardFeature feature) {
    for (const Sm90BackwardTiles& tiles : kSm90BackwardTiles) {
        if (tiles.head_dim >= std::max(p.head_dim, p.head_dim_v) &&
            tiles.head_dim - tiles.block_columns() < std::min(p.head_dim, p.head_dim_v) &&
            (tiles.dq_apart() || !deterministic) && has_instance(tiles, feature))
            return static_cast<int32_t>(&tiles - kSm90BackwardTiles);
    }
    return -1;
}
static_assert(std::rbegin(kSm90BackwardTiles)->head_dim == kMaxCudaGradientHeadDim &&
              std::rbegin(kSm90BackwardTiles)->dq_apart());

// What the tiles of a pair of sequence and KV head read of queries and gradients of the output, and add to.
int64_t query_bytes(const AttentionBackwardParams& p, const Sm90BackwardTiles& tiles) {
    const int64_t element_bytes = 2 * size_of(p.dtype) + (tiles.dq_apart() ? 0 : sizeof(float));
    return int64_t{p.seqlen_q} * p.group_size() * tiles.head_dim * element_bytes;
}

// `num_tiles` over the batch, for each of `heads`, by `ctas` each; pair_bytes: what the tiles of a pair read
// and add to.
TileOrder make_order(const AttentionBackwardParams& p, const Gpu& gpu, int64_t num_tiles, int32_t heads,
                     const IndexArray& packed, int64_t pair_bytes, bool of_queries, int ctas) {
    TileOrder order{};
    order.pairs = packed ? heads : p.batch * heads;
    order.tiles = static_cast<int32_t>(packed ? num_tiles : num_tiles / p.batch);
    // Without a causal mask the tiles of a pair are alike. With one the first keys have most queries, and the
    // last queries most keys.
    if (p.window_right >= 0) {
        order.last_first = of_queries;
        order.mix(ceil_divide(2 * gpu.num_sms, int64_t{ctas}), gpu.l2_bytes, pair_bytes);  // two rounds
    }
    return order;
}

// Tiles of keys over the batch; a bound where it is packed.
int64_t count_key_tiles(const AttentionBackwardParams& p, const Sm90BackwardTiles& tiles) {
    const int64_t num_tiles = p.batch * ceil_divide(p.seqlen_k, tiles.cluster_keys());
    return p.cu_seqlens_k ? std::min<int64_t>(num_tiles, p.total_k / tiles.cluster_keys() + p.batch)
                          : num_tiles;
}

TileOrder order_key_tiles(const AttentionBackwardParams& p, const Gpu& gpu, const Sm90BackwardTiles& tiles) {
    return make_order(p, gpu, count_key_tiles(p, tiles), p.num_kv_heads, p.cu_seqlens_k,
                      query_bytes(p, tiles), false, tiles.ctas());
}

// The order where sums of dQ take their parts in turn, so that their bits are the same at every call; nothing
// where a kernel of its own computes dQ instead, which short sequences and short launches do in less time,
// unless `even_if_short`.
std::optional<TurnOrder> find_turns(const AttentionBackwardParams& p, const Gpu& gpu,
                                    const Sm90BackwardTiles& tiles, bool even_if_short) {
    if (tiles.dq_apart() || !can_take_turns(bool{p.prefix_lens}, p.window_left)) return {};
    constexpr int64_t kFewestTiles = 8;  // of a sequence
    const int64_t key_tiles = ceil_divide(p.seqlen_k, tiles.keys());
    if (key_tiles < kFewestTiles && !even_if_short) return {};
    const TileOrder order = order_key_tiles(p, gpu, tiles);
    TurnOrder turns{order.tiles, order.pairs, 1, 0, p.window_right >= 0};
    if (turns.falling_first) {
        // CTAs at rising tiles wait for one another, and so these have to be few.
        if (turns.pairs < 4 * order.mixed && !even_if_short) return {};
        turns.mixed = order.mixed;
    } else if (order.num_ctas() < 8 * gpu.num_sms && !even_if_short) {
        return {};  // the first CTAs come all at once, and wait
    }
    // CTAs start at a steady rate, so that a pair's next one comes some steps behind if as many pairs are
    // mixed as start meanwhile.
    const int64_t query_tiles = ceil_divide(p.seqlen_q, tiles.queries);
    int64_t steps = query_tiles * p.group_size(), steps_behind = 4;
    if (turns.falling_first && p.seqlen_k <= p.seqlen_q) {
        // On the diagonal a CTA is as many steps behind the one before as queries fill a tile of keys; two
        // do.
        steps = ceil_divide(steps, 2);
        steps_behind = std::max(2 - tiles.keys() / tiles.queries, 0);
    }
    const int64_t wanted = ceil_divide(steps_behind * gpu.num_sms, steps);
    const int64_t in_cache = gpu.l2_bytes * 4 / 5 / query_bytes(p, tiles);
    turns.grouped = static_cast<int32_t>(std::clamp<int64_t>(std::min(wanted, in_cache), 1, order.pairs));
    // CTAs that wait for one another have little else to do if more of them are at a pair than it has steps.
    if (turns.grouped < wanted && key_tiles > query_tiles && !even_if_short) return {};
    turns.mixed += (turns.pairs - turns.mixed) % turns.grouped;
    return turns;
}

}  // namespace

AttentionParams with_gradients(const AttentionBackwardParams& p) {
    AttentionParams with = p;
    with.q = p.dout;
    with.q_batch_stride = p.dout_strides.batch;
    with.q_token_stride = p.dout_strides.token;
    with.q_head_stride = p.dout_strides.head;
    with.k = p.dk;
    with.k_outer_stride = p.dk_strides.batch;
    with.k_token_stride = p.dk_strides.token;
    with.k_head_stride = p.dk_strides.head;
    with.v = p.dv;
    with.v_outer_stride = p.dv_strides.batch;
    with.v_token_stride = p.dv_strides.token;
    with.v_head_stride = p.dv_strides.head;
    with.out = p.dq;
    with.out_batch_stride = p.dq_strides.batch;
    with.out_token_stride = p.dq_strides.token;
    with.out_head_stride = p.dq_strides.head;
    return with;
}

std::optional<Sm90BackwardPlan> plan_sm90_backward(const AttentionBackwardParams& call, const Gpu& gpu,
                                                   std::string* why_not, bool in_turns_even_if_short) {
    AttentionBackwardParams p = call;  // with a KV head for each part of a group
    if (!gpu.has_sm90_kernels) return refuse(why_not, "the GPU or the build has no sm_90a kernels");
    if (ceil_divide(p.head_dim, kSm90BlockColumns) != ceil_divide(p.head_dim_v, kSm90BlockColumns)) {
        return refuse(why_not,
                      "its instances have keys and values in equally many blocks of 64 columns, and these "
                      "are of head_dim ",
                      p.head_dim, " and ", p.head_dim_v);
    }
    if (p.ranges) return refuse(why_not, kHasNoRanges);
    const bool dropout = p.dropout.any(), softcap = p.softcap > 0.0f, alibi = p.alibi_slopes != nullptr;
    const bool blocks{p.block_mask};
    if (dropout + softcap + alibi + blocks > 1)
        return refuse(why_not, "no instance has more than one of dropout, a softcap, ALiBi and a block_mask");
    if (!(p.softmax_scale > 1e-6f))
        return refuse(why_not, "it divides by softmax_scale, which is ", p.softmax_scale);
    if (p.total_q == 0 || p.seqlen_q == 0 || p.seqlen_k == 0 || p.batch == 0)
        return refuse(why_not, "there are no queries, or no keys");
    Sm90BackwardPlan plan{};
    plan.dtype = p.dtype;
    plan.feature = dropout             ? Sm90BackwardFeature::dropout
                   : softcap           ? Sm90BackwardFeature::softcap
                   : p.alibi_symmetric ? Sm90BackwardFeature::symmetric_alibi
                   : alibi             ? Sm90BackwardFeature::alibi
                   : blocks            ? Sm90BackwardFeature::blocks
                                       : Sm90BackwardFeature::none;
    plan.row = find_tiles(p, p.deterministic, plan.feature);
    if (plan.row < 0)
        return refuse(why_not, "no deterministic instance, and none of head_dim above 128, has ",
                      to_string(plan.feature));
    constexpr double kStepsOfTile = 4, kStepsOfTileWithRoles = 12;
    plan.group_parts = choose_group_parts(
        p, gpu,
        {count_key_tiles(p, plan.tiles()), plan.tiles().cluster_keys(), plan.tiles().queries,
         gpu.num_sms / plan.tiles().ctas(), query_bytes(p, plan.tiles()),
         plan.tiles().roles ? kStepsOfTileWithRoles : kStepsOfTile});
    p.num_kv_heads *= plan.group_parts;
    if (p.deterministic && plan.feature == Sm90BackwardFeature::none) {
        const int32_t row = find_tiles(p, false, Sm90BackwardFeature::ordered);
        const auto turns =
            row < 0 ? std::nullopt : find_turns(p, gpu, kSm90BackwardTiles[row], in_turns_even_if_short);
        if (turns) {
            plan.row = row;
            plan.feature = Sm90BackwardFeature::ordered;
            plan.turn_order = *turns;
        }
    }
    const Sm90BackwardTiles& tiles = plan.tiles();
    plan.num_kv_heads = call.num_kv_heads;
    plan.num_q_heads = p.num_q_heads;
    plan.key_tiles = static_cast<int32_t>(ceil_divide(p.seqlen_k, tiles.cluster_keys()));
    const int64_t num_key_tiles = count_key_tiles(p, tiles);
    if (tiles.dq_apart()) {
        int64_t num_query_tiles = p.batch * ceil_divide(p.seqlen_q, kSm90GradientQueries);
        if (p.cu_seqlens_q)
            num_query_tiles = std::min<int64_t>(num_query_tiles, p.total_q / kSm90GradientQueries + p.batch);
        plan.num_query_tiles = static_cast<int32_t>(num_query_tiles);
    }
    const int64_t sequence_rows = ceil_divide(p.seqlen_q, tiles.queries) * tiles.queries;
    plan.num_rows =
        p.cu_seqlens_q
            ? ceil_divide(p.total_q + int64_t{p.batch} * tiles.queries, tiles.queries) * tiles.queries
            : p.batch * sequence_rows;
    constexpr int64_t kMaxGridY = 65535;
    if (num_key_tiles * p.num_kv_heads > kMaxIndex || plan.num_rows * p.num_q_heads > kMaxIndex ||
        p.num_q_heads > kMaxGridY)
        return refuse(why_not, "it counts rows in 32 bits, and there are ", plan.num_rows, " x ",
                      p.num_q_heads);
    plan.num_key_tiles = static_cast<int32_t>(num_key_tiles);
    plan.num_sequence_heads = p.batch * p.num_kv_heads;
    plan.key_order = order_key_tiles(p, gpu, tiles);
    if (plan.feature == Sm90BackwardFeature::ordered)
        plan.turn_bytes = plan.num_rows / tiles.queries * p.num_q_heads * tiles.warpgroups * sizeof(int32_t);
    const int64_t num_ctas = tiles.ctas() * plan.key_order.num_ctas();
    plan.num_ctas =
        static_cast<int32_t>(tiles.persistent() ? std::min<int64_t>(num_ctas, gpu.num_sms) : num_ctas);
    if (tiles.dq_apart()) {
        plan.query_order = make_order(p, gpu, plan.num_query_tiles, p.num_q_heads, p.cu_seqlens_q,
                                      int64_t{p.seqlen_k} * tiles.head_dim * 2 * size_of(p.dtype), true, 1);
    }
    plan.sequence_rows = p.cu_seqlens_q ? 0 : static_cast<int32_t>(sequence_rows);
    const Sm90Operands operands(call), gradients(with_gradients(call));
    const std::pair<const char*, const Sm90Operand*> arrays[] = {
        {"q", &operands.q},   {"k", &operands.k},   {"v", &operands.v},     {"dout", &gradients.q},
        {"dk", &gradients.k}, {"dv", &gradients.v}, {"dq", &gradients.out},
    };
    for (const auto& [name, array] : arrays) {
        if (array == &gradients.out && !tiles.dq_apart()) continue;  // written row by row
        if (!array->is_movable(p.dtype))
            return refuse(why_not, "the copy engine (TMA) cannot move the rows of ", name);
    }
    if (!aligned(p.out, 16, {p.out_batch_stride, p.out_token_stride, p.out_head_stride}, p.dtype))
        return refuse(why_not, "rows of out do not start on 16 bytes");
    plan.dq_aligned = aligned(p.dq, 16, {p.dq_strides.batch, p.dq_strides.token, p.dq_strides.head}, p.dtype);
    plan.part_bytes = plan.group_parts > 1 ? GroupParts(call, plan.group_parts).bytes(call) : 0;
    plan.slope_bytes = SlopeParts::bytes(p, plan.slope_parts());
    plan.sink_bytes = SinkTerms::bytes(p, plan.num_rows);
    return plan;
}

Explanation describe(const Sm90BackwardPlan& plan) {
    const Sm90BackwardTiles& tiles = plan.tiles();
    Explanation text;
    text.kernel = name_of(plan.dtype, tiles, plan.feature);
    text.summary =
        text_of(counted(plan.num_key_tiles, "tile"), " of ", tiles.cluster_keys(), " keys x ",
                text_of_heads(plan.num_kv_heads, plan.group_parts), ", behind prepare_backward_kernel",
                tiles.dq_apart()                       ? "; sm90_query_gradients_kernel"
                : converts_beside(tiles, plan.feature) ? ""
                                                       : "; convert_dq_kernel",
                plan.group_parts > 1 ? "; add_group_parts_kernel" : "",
                plan.slope_bytes > 0 ? "; slope_gradients_kernel" : "",
                plan.sink_bytes > 0 ? "; sink_gradients_kernel" : "");
    text.file = "src/cuda/sm90_backward/kernel.cuh";
    text.plan = {
        {"dtype", to_string(plan.dtype)},      {"head_dim", tiles.head_dim},
        {"feature", to_string(plan.feature)},  {"num_kv_heads", plan.num_kv_heads},
        {"num_q_heads", plan.num_q_heads},     {"group_parts", plan.group_parts},
        {"key_tiles", plan.key_tiles},         {"num_key_tiles", plan.num_key_tiles},
        {"mixed_pairs", plan.key_order.mixed}, {"num_ctas", plan.num_ctas},
        {"sequence_rows", plan.sequence_rows}, {"num_rows", plan.num_rows},
        {"dq_aligned", plan.dq_aligned},       {"workspace_bytes", plan.workspace_bytes()},
    };
    if (tiles.dq_apart()) {
        text.plan.emplace_back("num_query_tiles", plan.num_query_tiles);
        text.plan.emplace_back("mixed_query_pairs", plan.query_order.mixed);
    }
    if (plan.feature == Sm90BackwardFeature::ordered) {
        text.plan.emplace_back("grouped_pairs", plan.turn_order.grouped);
        text.plan.emplace_back("last_pairs", plan.turn_order.mixed);
        text.plan.emplace_back("falling_first", plan.turn_order.falling_first);
    }
    return text;
}

std::vector<std::string> sm90_backward_instances() {
    std::vector<std::string> names;
    for (DType dtype : kAttentionTypes) {
        for (const Sm90BackwardTiles& tiles : kSm90BackwardTiles) {
            for (Sm90BackwardFeature feature : kSm90BackwardFeatures) {
                if (has_instance(tiles, feature)) names.push_back(name_of(dtype, tiles, feature));
            }
        }
    }
    return names;
}

}  // namespace octavo::cuda
