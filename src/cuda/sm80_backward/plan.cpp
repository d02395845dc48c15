#include "cuda/sm80_backward/plan.h"

#include "common/fail.h"
#include "cuda/alignment.h"
#include "cuda/attention_backward/group_parts.h"
#include "cuda/attention_backward/sink_terms.h"
#include "cuda/attention_backward/slope_parts.h"

#include <algorithm>
#include <iterator>

namespace octavo::cuda {
namespace {

constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;

static_assert(std::rbegin(kSm80BackwardTiles)->head_dim == kMaxCudaGradientHeadDim,
              "every head dim needs a row");

int64_t shared_bytes(const Sm80BackwardTiles& tiles) {
    return static_cast<int64_t>(
        std::max(sm80_backward_shared_bytes(tiles.head_dim, tiles.keys) + sm80_backward_ds_bytes(tiles.keys),
                 sm80_backward_shared_bytes(tiles.head_dim, tiles.queries)));
}

// Among the rows for the smallest head dim that holds those of keys and of values, returns the last one for
// which the GPU has enough shared memory.
int32_t choose_tiles(const AttentionBackwardParams& p, const Gpu& gpu) {
    int32_t best = -1;
    for (int32_t row = 0; row < static_cast<int32_t>(std::size(kSm80BackwardTiles)); ++row) {
        const Sm80BackwardTiles& tiles = kSm80BackwardTiles[row];
        if (tiles.head_dim < std::max(p.head_dim, p.head_dim_v)) continue;
        if (best >= 0 && tiles.head_dim != kSm80BackwardTiles[best].head_dim) break;
        if (best < 0 || gpu.shared_bytes_per_block >= shared_bytes(tiles)) best = row;
    }
    return best;
}

// The number of tiles over the batch. For a packed batch it is a bound, since only the device knows the
// lengths.
int32_t bound_tiles(const AttentionBackwardParams& p, const char* what, int64_t tiles, int64_t total,
                    int32_t rows) {
    int64_t count = p.batch * tiles;
    if (p.cu_seqlens_q) count = std::min(count, total / rows + p.batch);
    if (count > kMaxGridX) {
        fail<ValueError>(p.op, "the batch has ", count, " tiles of ", rows, " ", what,
                         "; one launch takes at most ", kMaxGridX);
    }
    return static_cast<int32_t>(count);
}

// What the tiles of a pair of sequence and KV head read of queries and gradients of the output, and add to.
int64_t query_bytes(const AttentionBackwardParams& p, const Sm80BackwardPlan& plan) {
    const int64_t element_bytes = 2 * size_of(p.dtype) + (plan.sums_dq ? int64_t{sizeof(float)} : 0);
    return int64_t{p.seqlen_q} * p.group_size() * plan.tiles().head_dim * element_bytes;
}

// Under a causal mask the first keys have most queries, so that the last pairs are mixed, for two rounds of
// all SMs.
TileOrder order_key_tiles(const AttentionBackwardParams& p, const Gpu& gpu, const Sm80BackwardPlan& plan) {
    const Sm80BackwardTiles& tiles = plan.tiles();
    const int64_t pairs = p.cu_seqlens_k ? p.num_kv_heads : int64_t{p.batch} * p.num_kv_heads;
    const int64_t tiles_of_pair = p.cu_seqlens_k ? plan.num_key_tiles : plan.key_tiles;
    if (pairs * tiles_of_pair > kMaxGridX) {
        fail<ValueError>(p.op, "the batch has ", plan.num_key_tiles, " tiles of ", tiles.keys.rows(),
                         " keys, with ", p.num_kv_heads, " KV heads each; one launch takes at most ",
                         kMaxGridX, " in all");
    }
    TileOrder order{};
    order.tiles = static_cast<int32_t>(tiles_of_pair);
    order.pairs = tiles_of_pair > 0 ? static_cast<int32_t>(pairs) : 0;
    if (p.window_right < 0 || order.tiles == 0 || p.seqlen_q == 0) return order;
    order.mix(int64_t{2} * gpu.num_sms * tiles.keys.ctas_per_sm, gpu.l2_bytes, query_bytes(p, plan));
    return order;
}

std::string name_of(DType dtype, const Sm80BackwardTiles& tiles) {
    return text_of("sm80_backward<", to_string(dtype), ", head_dim ", tiles.head_dim, ", ", tiles.keys.rows(),
                   " keys x ", tiles.keys.columns, " queries",
                   tiles.keys.ds_slots > 1 ? ", dQ a step late>" : ">");
}

}  // namespace

Sm80BackwardPlan plan_sm80_backward(const AttentionBackwardParams& call, const Gpu& gpu) {
    AttentionBackwardParams p = call;  // with a KV head for each part of a group
    constexpr int64_t kMaxGridY = 65535, kAlignment = 256;
    if (p.num_q_heads > kMaxGridY)
        fail<ValueError>(p.op, "num_q_heads (", p.num_q_heads, ") must be at most ", kMaxGridY, " on CUDA");
    Sm80BackwardPlan plan{};
    plan.dtype = p.dtype;
    plan.row = choose_tiles(p, gpu);
    // The instances with dropout serve chunks and symmetric ALiBi, too: see sequence_of().
    plan.has_dropout = p.dropout.any() || p.attention_chunk.divisor > 0 || p.alibi_symmetric;
    plan.has_blocks = static_cast<bool>(p.block_mask);
    plan.has_ranges = static_cast<bool>(p.ranges);
    plan.num_q_heads = p.num_q_heads;
    plan.num_kv_heads = call.num_kv_heads;
    const int32_t key_rows = plan.tiles().keys.rows(), query_rows = plan.tiles().queries.rows();
    plan.key_tiles = static_cast<int32_t>(ceil_divide(p.seqlen_k, key_rows));
    plan.query_tiles = static_cast<int32_t>(ceil_divide(p.seqlen_q, query_rows));
    plan.sums_dq = !p.deterministic && !p.dalibi_slopes && !plan.has_blocks && !plan.has_ranges;
    const int32_t queries = plan.tiles().keys.columns;
    const int64_t sequence_rows = ceil_divide(p.seqlen_q, queries) * queries;
    plan.num_rows = p.cu_seqlens_q ? ceil_divide(p.total_q + int64_t{p.batch} * queries, queries) * queries
                                   : p.batch * sequence_rows;
    // They are counted in 32 bits, and short sequences would have tiles that are mostly empty.
    constexpr int64_t kMostRows = 4;  // for each query
    if (plan.num_rows > std::min<int64_t>(kMostRows * p.total_q, INT32_MAX)) plan.sums_dq = false;
    plan.sequence_rows = p.cu_seqlens_q || !plan.sums_dq ? 0 : static_cast<int32_t>(sequence_rows);
    plan.num_key_tiles = bound_tiles(p, "keys", plan.key_tiles, p.total_k, key_rows);
    plan.num_query_tiles = bound_tiles(p, "queries", plan.query_tiles, p.total_q, query_rows);
    plan.out_aligned =
        aligned(p.out, 16, {p.out_batch_stride, p.out_token_stride, p.out_head_stride}, p.dtype);
    plan.q_aligned = aligned(p.q, 16, {p.q_batch_stride, p.q_token_stride, p.q_head_stride}, p.dtype);
    plan.k_aligned = aligned(p.k, 16, {p.k_outer_stride, p.k_token_stride, p.k_head_stride}, p.dtype);
    plan.v_aligned = aligned(p.v, 16, {p.v_outer_stride, p.v_token_stride, p.v_head_stride}, p.dtype);
    auto is_aligned = [&p](const void* array, const GradientStrides& strides) {
        return aligned(array, 16, {strides.batch, strides.token, strides.head}, p.dtype);
    };
    plan.dout_aligned = is_aligned(p.dout, p.dout_strides);
    plan.dq_aligned = is_aligned(p.dq, p.dq_strides);
    plan.dk_aligned = is_aligned(p.dk, p.dk_strides);
    plan.dv_aligned = is_aligned(p.dv, p.dv_strides);
    plan.group_parts = 1;
    if (plan.dk_aligned && plan.dv_aligned) {
        constexpr double kStepsOfTile = 4;
        plan.group_parts = choose_group_parts(
            p, gpu,
            {plan.num_key_tiles, key_rows, queries, gpu.num_sms * plan.tiles().keys.ctas_per_sm,
             query_bytes(p, plan), kStepsOfTile});
    }
    p.num_kv_heads *= plan.group_parts;
    plan.part_bytes = 0;
    if (plan.group_parts > 1)
        plan.part_bytes =
            ceil_divide(GroupParts(call, plan.group_parts).bytes(call), kAlignment) * kAlignment;
    plan.key_order = order_key_tiles(p, gpu, plan);
    const int64_t statistics = 2 * p.total_q * p.num_q_heads * int64_t{sizeof(float)};
    plan.statistics_bytes = ceil_divide(statistics, kAlignment) * kAlignment;
    plan.slope_bytes = SlopeParts::bytes(p, plan.query_tiles);
    plan.sink_bytes = SinkTerms::bytes(p, p.total_q);
    return plan;
}

Explanation describe(const Sm80BackwardPlan& plan) {
    const Sm80BackwardTiles& tiles = plan.tiles();
    Explanation text;
    text.kernel = name_of(plan.dtype, tiles);
    text.summary =
        text_of("query_statistics_kernel; key_gradients_kernel over ", counted(plan.num_key_tiles, "tile"),
                " of ", tiles.keys.rows(), " keys x ", text_of_heads(plan.num_kv_heads, plan.group_parts),
                plan.sums_dq
                    ? "; convert_query_sums_kernel"
                    : text_of("; query_gradients_kernel over ", counted(plan.num_query_tiles, "tile"), " of ",
                              tiles.queries.rows(), " queries x ", counted(plan.num_q_heads, "query head")));
    if (plan.has_blocks)
        text.summary += "; in the instances for a block_mask";
    else if (plan.has_ranges)
        text.summary += "; in the instances for bidirectional_ranges";
    else if (plan.has_dropout)
        text.summary += "; in the instances for dropout, chunks and symmetric ALiBi";
    if (plan.group_parts > 1) text.summary += "; add_group_parts_kernel";
    if (plan.slope_bytes > 0) text.summary += "; slope_gradients_kernel";
    if (plan.sink_bytes > 0) text.summary += "; sink_gradients_kernel";
    text.file = "src/cuda/sm80_backward/key_gradients.cuh";
    text.plan = {
        {"dtype", to_string(plan.dtype)},      {"head_dim", tiles.head_dim},
        {"has_dropout", plan.has_dropout},     {"has_blocks", plan.has_blocks},
        {"has_ranges", plan.has_ranges},       {"num_q_heads", plan.num_q_heads},
        {"num_kv_heads", plan.num_kv_heads},   {"group_parts", plan.group_parts},
        {"key_tile_rows", tiles.keys.rows()},  {"query_tile_rows", tiles.queries.rows()},
        {"key_tiles", plan.key_tiles},         {"query_tiles", plan.query_tiles},
        {"num_key_tiles", plan.num_key_tiles}, {"num_query_tiles", plan.num_query_tiles},
        {"mixed_pairs", plan.key_order.mixed}, {"q_aligned", plan.q_aligned},
        {"k_aligned", plan.k_aligned},         {"v_aligned", plan.v_aligned},
        {"out_aligned", plan.out_aligned},     {"dout_aligned", plan.dout_aligned},
        {"dq_aligned", plan.dq_aligned},       {"dk_aligned", plan.dk_aligned},
        {"dv_aligned", plan.dv_aligned},       {"workspace_bytes", plan.workspace_bytes()},
    };
    text.plan.emplace_back("sums_dq", plan.sums_dq);
    if (plan.sums_dq) text.plan.emplace_back("num_rows", plan.num_rows);
    return text;
}

std::vector<std::string> sm80_backward_instances() {
    std::vector<std::string> names;
    for (DType dtype : kAttentionTypes) {
        for (const Sm80BackwardTiles& tiles : kSm80BackwardTiles) names.push_back(name_of(dtype, tiles));
    }
    return names;
}

}  // namespace octavo::cuda
