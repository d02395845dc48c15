#include "cuda/sm80_attention/plan.h"

#include "common/fail.h"
#include "cuda/alignment.h"

#include <algorithm>
#include <iterator>

namespace octavo::cuda {
namespace {

static_assert(std::rbegin(kSm80Tiles)->head_dim == kMaxHeadDim, "every head dim needs a row");

// Among the rows for the smallest head dim that holds those of keys and of values, returns the one with the
// most stages that fit into shared memory. The columns in excess are zeros in shared memory, or unused.
int32_t choose_tiles(const AttentionParams& p, const Gpu& gpu) {
    int32_t best = -1;
    for (int32_t row = 0; row < static_cast<int32_t>(std::size(kSm80Tiles)); ++row) {
        const Sm80Tiles& tiles = kSm80Tiles[row];
        if (tiles.head_dim < std::max(p.head_dim, p.head_dim_v)) continue;
        if (best >= 0 && tiles.head_dim != kSm80Tiles[best].head_dim) break;
        if (best < 0 || gpu.shared_bytes_per_block >= static_cast<int64_t>(sm80_shared_bytes(tiles.stages)))
            best = row;
    }
    return best;
}

// The number of row tiles over the batch. For a packed batch it is a bound, since only the device knows the
// lengths.
int64_t bound_row_tiles(const AttentionParams& p, int32_t rows) {
    const int64_t group_size = p.group_size();
    const int64_t by_batch = p.batch * ceil_divide(p.seqlen_q * group_size, rows);
    if (!p.cu_seqlens_q) return by_batch;
    return std::min(by_batch, p.total_q * group_size / rows + p.batch);
}

// Returns enough splits that the CTAs fill the device twice, as long as each CTA has a few tiles of keys.
// Dense and packed attention never splits, so that a sequence's bits do not depend on its batch.
int32_t choose_num_splits(const AttentionParams& p, const Gpu& gpu, const Sm80Tiles& tiles,
                          int64_t num_row_tiles) {
    if (p.num_splits > 0) return p.num_splits;
    if (!p.paged() || p.batch_invariant) return 1;
    constexpr int64_t kCtasPerSm = 2, kMinTiles = 4, kMaxSplits = 128;
    const int64_t ctas = num_row_tiles * p.num_kv_heads;
    const int64_t key_tiles = ceil_divide(p.seqlen_k, tiles.keys);
    const int64_t wanted = kCtasPerSm * gpu.num_sms / std::max<int64_t>(ctas, 1);
    return static_cast<int32_t>(std::clamp<int64_t>(std::min(wanted, key_tiles / kMinTiles), 1, kMaxSplits));
}

std::string name_of(DType dtype, const Sm80Tiles& tiles) {
    return text_of("sm80_attention<", to_string(dtype), ", head_dim ", tiles.head_dim, ", ",
                   counted(tiles.stages, "stage"), ">");
}

const char* name_of(Sm80Feature feature) {
    switch (feature) {
        case Sm80Feature::none: break;
        case Sm80Feature::dropout: return "dropout";
        case Sm80Feature::codes: return "codes";
        case Sm80Feature::blocks: return "blocks";
        case Sm80Feature::ranges: return "ranges";
        case Sm80Feature::code_ranges: return "code_ranges";
    }
    return "none";
}

}  // namespace

Sm80Plan plan_sm80_attention(const AttentionParams& p, const Gpu& gpu) {
    Sm80Plan plan{};
    plan.dtype = p.dtype;
    plan.row = choose_tiles(p, gpu);
    plan.k_dtype = p.k_dtype;
    plan.v_dtype = p.v_dtype;
    if (p.dropout.any() || p.alibi_symmetric) plan.feature = Sm80Feature::dropout;
    if (p.ranges) plan.feature = Sm80Feature::ranges;
    if (is_code(p.k_dtype)) plan.feature = p.ranges ? Sm80Feature::code_ranges : Sm80Feature::codes;
    if (p.block_mask) plan.feature = Sm80Feature::blocks;
    plan.num_sequences = p.batch;
    plan.head_dim_v = p.head_dim_v;
    plan.num_kv_heads = p.num_kv_heads;
    const int32_t rows = plan.tiles().rows();
    const int64_t num_row_tiles = bound_row_tiles(p, rows);
    constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1, kMaxGridY = 65535;
    if (num_row_tiles > kMaxGridX) {
        fail<ValueError>(p.op, "the batch has ", num_row_tiles, " tiles of ", rows,
                         " queries; one launch takes at most ", kMaxGridX);
    }
    if (p.num_kv_heads > kMaxGridY) {
        fail<ValueError>(p.op, "num_kv_heads (", p.num_kv_heads, ") must be at most ", kMaxGridY, " on CUDA");
    }
    plan.num_row_tiles = static_cast<int32_t>(num_row_tiles);
    plan.num_splits = choose_num_splits(p, gpu, plan.tiles(), num_row_tiles);
    plan.num_partial_rows = plan.num_splits > 1 ? plan.num_splits * p.total_q * p.num_q_heads : 0;
    plan.q_aligned = aligned(p.q, 16, {p.q_batch_stride, p.q_token_stride, p.q_head_stride}, p.dtype);
    plan.k_aligned = aligned(p.k, 16, {p.k_outer_stride, p.k_token_stride, p.k_head_stride}, p.k_dtype);
    plan.v_aligned = aligned(p.v, 16, {p.v_outer_stride, p.v_token_stride, p.v_head_stride}, p.v_dtype);
    plan.out_aligned =
        aligned(p.out, 16, {p.out_batch_stride, p.out_token_stride, p.out_head_stride}, p.dtype);
    return plan;
}

Explanation describe(const Sm80Plan& plan) {
    const Sm80Tiles& tiles = plan.tiles();
    Explanation text;
    text.kernel = name_of(plan.dtype, tiles);
    text.summary = text_of(counted(plan.num_row_tiles, "tile"), " of ", tiles.rows(), " rows x ",
                           counted(plan.num_kv_heads, "KV head"), " x ", counted(plan.num_splits, "split"),
                           ": ", counted(plan.grid().size(), "CTA"), " of ", plan.threads(), " threads");
    if (reads_codes(plan.feature)) {
        text.summary += text_of("; keys of ", to_string(plan.k_dtype), " and values of ",
                                to_string(plan.v_dtype), " become ", to_string(plan.dtype));
    }
    if (plan.feature == Sm80Feature::blocks) text.summary += "; visits the tiles that block_mask keeps";
    if (plan.num_splits > 1) text.summary += "; then combine_splits_kernel";
    text.file = "src/cuda/sm80_attention/kernel.cuh";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"head_dim", tiles.head_dim},
        {"stages", tiles.stages},
        {"feature", name_of(plan.feature)},
        {"k_dtype", to_string(plan.k_dtype)},
        {"v_dtype", to_string(plan.v_dtype)},
        {"num_sequences", plan.num_sequences},
        {"num_kv_heads", plan.num_kv_heads},
        {"num_row_tiles", plan.num_row_tiles},
        {"num_splits", plan.num_splits},
        {"q_aligned", plan.q_aligned},
        {"k_aligned", plan.k_aligned},
        {"v_aligned", plan.v_aligned},
        {"out_aligned", plan.out_aligned},
        {"num_ctas", plan.grid().size()},
        {"threads", plan.threads()},
        {"workspace_bytes", plan.workspace_bytes()},
    };
    return text;
}

std::vector<std::string> sm80_attention_instances() {
    std::vector<std::string> names;
    for (DType dtype : kAttentionTypes) {
        for (const Sm80Tiles& tiles : kSm80Tiles) names.push_back(name_of(dtype, tiles));
    }
    return names;
}

}  // namespace octavo::cuda
