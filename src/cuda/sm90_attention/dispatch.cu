// From checked parameters to the instance of the prefill kernel that serves them, and how it cuts the work.
#include "cuda/alignment.h"
#include "cuda/runtime.h"
#include "cuda/sm90_attention/parameters.h"
#include "cuda/sm90_attention/sm90_attention.h"
#include "cuda/sm90_attention/tiles.h"
#include "cuda/tma/tensor_map.h"
#include "cuda/types.h"
#include "cuda/workspace.h"

#include <algorithm>
#include <numeric>

namespace octavo::cuda {

template <class T, int kHeadDim, int kWarpgroups, int kCtas>
void launch_sm90_attention(const AttentionParams& params, const Sm90Launch& plan, int32_t num_ctas,
                           cudaStream_t stream);

namespace {

struct Instance {
    DType dtype;
    Sm90Tiles tiles;
    void (*launch)(const AttentionParams&, const Sm90Launch&, int32_t, cudaStream_t);
};

// Every instance compiled, by rising head dim; CMake writes the list that it compiles. None without sm_90a.
const std::vector<Instance>& all_instances() {
    static const std::vector<Instance> instances = {
#define OCTAVO_SM90_INSTANCE(type, head_dim, warpgroups, ctas) \
    {dtype_of<type>(), sm90_tiles(head_dim, warpgroups, ctas), \
     launch_sm90_attention<type, head_dim, warpgroups, ctas>},
#include "sm90_instances.inc"
#undef OCTAVO_SM90_INSTANCE
    };
    return instances;
}

constexpr int32_t kGroupRows = 64;
constexpr int64_t kMaxIndex = (int64_t{1} << 31) - 1;

int64_t round_up_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Runs of 64 rows that one sequence of a dense batch takes over all heads, with `heads` of them side by side.
int64_t row_groups(const AttentionParams& p, int32_t heads) {
    return p.num_q_heads / heads * round_up_divide(p.seqlen_q, kGroupRows / heads);
}

// The largest divisor of the group size that wastes few rows: heads side by side share K and V and see the
// same keys. Of a packed batch only the bound of the lengths is known here, and one row in 16 may be wasted.
// (Nor is the mean used: a sequence's bits do not depend on its neighbours.)
int32_t choose_heads(const AttentionParams& p) {
    int32_t best = 1;
    for (int32_t heads = 2; heads <= std::min(p.group_size(), kGroupRows); ++heads) {
        if (p.group_size() % heads != 0) continue;
        const bool fits = p.cu_seqlens_q ? 16 * (kGroupRows % heads) <= kGroupRows
                                         : row_groups(p, heads) <= row_groups(p, best);
        if (fits) best = heads;
    }
    return best;
}

// Whether a packed batch may hold row tiles of few rows. One without gives the same bits in either kernel, as
// the sequences of one with them do that have none.
bool may_have_few_rows(const AttentionParams& p, const Sm90Tiles& tiles, int32_t heads) {
    if (!p.cu_seqlens_q || p.alibi_slopes || p.dropout.any()) return false;
    const int32_t rest = p.seqlen_q % (tiles.warpgroups * tiles.ctas * (kGroupRows / heads));
    return p.batch_invariant || p.total_q != int64_t{p.batch} * p.seqlen_q ||
           (rest > 0 && rest * heads <= max_few_rows(tiles.head_dim));
}

// Over the batch and all heads; of a packed batch a bound.
int64_t num_row_tiles(const AttentionParams& p, int32_t warpgroups, int32_t heads) {
    const int64_t tile_tokens = int64_t{warpgroups} * (kGroupRows / heads);
    int64_t row_tiles = p.batch * round_up_divide(p.seqlen_q, tile_tokens);
    if (p.cu_seqlens_q) row_tiles = std::min(row_tiles, p.total_q / tile_tokens + p.batch);
    return row_tiles * (p.num_q_heads / heads);
}

// Units in a section. Few, so that row tiles that share K and V meet in time and in the L2 cache; but enough
// row tiles that the SMs end together, although under a causal mask the first take longest.
int32_t choose_section(const AttentionParams& p, const Sm90Launch& plan, int64_t clusters) {
    const int64_t row_tiles = (p.window_right >= 0 ? 4 : 2) * clusters;
    // Beyond these, K and V are read from memory again and again: half of the cache, unless so few units run
    // at a time that eight CTAs share each.
    const int64_t unit_bytes = int64_t{4} * p.seqlen_k * p.head_dim * plan.heads / p.group_size();
    const int64_t most =
        std::max(l2_bytes(p.device.index) / 2 / std::max<int64_t>(unit_bytes, 1), clusters / 8);
    const int64_t units = std::min(round_up_divide(row_tiles, plan.num_row_tiles), most);
    return static_cast<int32_t>(std::clamp<int64_t>(units, 1, plan.num_units));
}

// Blocks of 64 rows that an instance works through, those wasted included, for a comparison of instances.
// Dense and packed arrays, and where bits must not depend on the batch: over one sequence of the given
// length. Paged else: how long the SMs take in rounds of one row tile each.
int64_t padded_blocks(const AttentionParams& p, const Sm90Tiles& tiles) {
    const int32_t heads = choose_heads(p), blocks = tiles.warpgroups * tiles.ctas;
    if (!p.paged() || p.batch_invariant)
        return blocks * round_up_divide(p.seqlen_q, int64_t{blocks} * (kGroupRows / heads));
    return blocks * round_up_divide(num_row_tiles(p, blocks, heads), num_sms(p.device.index));
}

// Whether `tiles` serve better than `before`, a row of the same head dim.
bool serve_better(const AttentionParams& p, const Sm90Tiles& tiles, const Sm90Tiles& before) {
    int64_t keys = p.window_right >= 0 ? p.seqlen_k - std::min(p.seqlen_q, p.seqlen_k) / 2 : p.seqlen_k;
    if (p.batch_invariant) keys = kMaxIndex;  // the width of the page table is the batch's
    if (p.window_left >= 0) keys = std::min<int64_t>(keys, p.window_left);
    if (keys < tiles.from_keys) return false;
    // Pairs are for arrays that are not paged; and queries that stand far apart see different windows of
    // keys.
    if (tiles.ctas > 1 && (p.paged() || p.window_left >= 0)) return false;
    return 100 * padded_blocks(p, tiles) <= 106 * padded_blocks(p, before);
}

// Of the instances of the smallest head dim that holds the problem's, the last that serves better than those
// before it. Null if there is none.
const Instance* choose_instance(const AttentionParams& p) {
    const Instance* best = nullptr;
    for (const Instance& instance : all_instances()) {
        if (instance.dtype != p.dtype || instance.tiles.head_dim < p.head_dim) continue;
        if (best && instance.tiles.head_dim != best->tiles.head_dim) break;
        if (!best || serve_better(p, instance.tiles, best->tiles)) best = &instance;
    }
    return best;
}

// Whether the keys of a row tile may be shared out.
bool may_split(const AttentionParams& p, const Sm90Tiles& tiles) {
    return p.paged() && has_splits(tiles.ctas) && !p.alibi_slopes && !p.dropout.any() && !p.batch_invariant;
}

// Shares out the keys of row tiles behind the last whole round of the SMs, where what is left takes less long
// so. Row tiles of few rows among others have a kernel that does not, for more row tiles than SMs.
void choose_splits(const AttentionParams& p, const Sm90Tiles& tiles, int64_t row_tiles, Sm90Launch& plan) {
    const int64_t sms = num_sms(p.device.index), rest = row_tiles % sms;
    if (rest == 0 || !may_split(p, tiles) || (plan.few_rows && row_tiles > sms)) return;
    int64_t keys = p.seqlen_k;
    if (p.window_left >= 0 && p.window_right >= 0 && !p.prefix_lens)
        keys = std::min<int64_t>(
            keys, int64_t{p.window_left} + p.window_right + int64_t{plan.tokens} * tiles.warpgroups);
    const int64_t key_tiles = keys / tiles.keys;
    int64_t shortest = key_tiles;      // in tiles of keys
    constexpr int64_t kMaxRounds = 4;  // bounds the workspace
    for (int32_t splits = 2; splits <= kMaxSm90Splits && rest * splits <= kMaxRounds * sms; ++splits) {
        const int64_t merge = 3 + splits / 2;
        const int64_t time =
            round_up_divide(rest * splits, sms) * (round_up_divide(key_tiles, splits) + merge);
        if (time >= shortest) continue;
        shortest = time;
        plan.num_splits = splits;
    }
    if (plan.num_splits == 0) return;
    plan.few_rows = false;
    plan.num_whole = static_cast<int32_t>(row_tiles - rest);
    plan.split_blocks =
        static_cast<int32_t>(std::min<int64_t>(round_up_divide(p.seqlen_q, plan.tokens), tiles.warpgroups));
}

// Memory for so many parts.
size_t partial_bytes(const Sm90Tiles& tiles, int64_t num_parts) {
    return num_parts * kGroupRows * (tiles.head_dim + 2) * sizeof(float);
}

// Keys that one copy brings.
int32_t box_keys(const AttentionParams& p, const Sm90Tiles& tiles) {
    return p.paged() ? std::gcd(p.page_size, tiles.keys) : tiles.keys / tiles.ctas;
}

// One array as the copy engine is to see it: [outer, token, head, column].
struct Operand {
    const void* base;
    int64_t outer_stride, token_stride, head_stride;
    int32_t num_heads;
    int32_t edge;

    static constexpr int64_t kAnyStride = kSm90BlockColumns;

    // An axis of length 1 is unused: any stride does, where it may be zero.
    Operand(const void* base, int64_t num_outer, int64_t outer_stride, int64_t num_tokens,
            int64_t its_token_stride, int64_t head_stride, int32_t num_heads, int32_t edge)
        : base(base),
          outer_stride(num_outer == 1 ? kAnyStride : outer_stride),
          token_stride(num_tokens == 1 ? kAnyStride : its_token_stride),
          head_stride(num_heads == 1 ? kAnyStride : head_stride),
          num_heads(num_heads),
          edge(edge) {}

    bool movable(DType dtype) const {
        constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;
        for (int64_t stride : {outer_stride, token_stride, head_stride}) {
            if (stride <= 0 || 2 * stride >= kMaxStrideBytes) return false;
        }
        return aligned(base, 16, {outer_stride, token_stride, head_stride}, dtype) &&
               reinterpret_cast<uintptr_t>(base) / 2 > static_cast<uintptr_t>(edge * token_stride);
    }
    CUtensorMap map(int32_t head_dim, int32_t box_heads, int32_t box_tokens) const {
        return make_tensor_map(static_cast<const unsigned char*>(base) - 2 * (edge * token_stride),
                               {{head_dim, num_heads, edge, kMaxIndex, kMaxIndex},
                                {head_stride, token_stride, token_stride, outer_stride},
                                {kSm90BlockColumns, box_heads, box_tokens, 1, 1}});
    }
};

struct Operands {
    Operand q, out, k, v;

    explicit Operands(const AttentionParams& p)
        : q(p.q, p.cu_seqlens_q || p.q_batch_stride == 0 ? 1 : p.batch, p.q_batch_stride, num_tokens_q(p),
            p.q_token_stride, p.q_head_stride, p.num_q_heads, q_edge(p)),
          out(p.out, p.cu_seqlens_q ? 1 : p.batch, p.out_batch_stride, num_tokens_q(p), p.out_token_stride,
              p.out_head_stride, p.num_q_heads, q_edge(p)),
          k(p.k, num_outer_k(p), p.k_outer_stride, kMaxIndex, p.k_token_stride, p.k_head_stride,
            p.num_kv_heads, k_edge(p)),
          v(p.v, num_outer_k(p), p.v_outer_stride, kMaxIndex, p.v_token_stride, p.v_head_stride,
            p.num_kv_heads, k_edge(p)) {}

    static int64_t num_tokens_q(const AttentionParams& p) { return p.cu_seqlens_q ? p.total_q : p.seqlen_q; }
    // The bound of a packed batch may be any number, and the address space has to hold the edge below the
    // array.
    static int32_t q_edge(const AttentionParams& p) {
        return static_cast<int32_t>(std::min<int64_t>(p.seqlen_q, num_tokens_q(p)));
    }

    static int64_t num_outer_k(const AttentionParams& p) {
        if (p.paged()) return kMaxIndex;
        return p.cu_seqlens_k ? 1 : p.batch;
    }
    static int32_t k_edge(const AttentionParams& p) { return p.paged() ? p.page_size : p.seqlen_k; }
};

}  // namespace

std::vector<std::string> sm90_attention_instances() {
    std::vector<std::string> names;
    for (const Instance& instance : all_instances()) {
        names.push_back("sm90_attention<" + to_string(instance.dtype) + ", " +
                        std::to_string(instance.tiles.head_dim) + ", " +
                        std::to_string(kGroupRows * instance.tiles.warpgroups) + " rows" +
                        (instance.tiles.ctas > 1 ? " in pairs>" : ">"));
    }
    return names;
}

bool sm90_attention_serves(const AttentionParams& p) {
    if (p.total_q == 0) return false;
    const Instance* instance = choose_instance(p);
    if (!instance || compute_capability(p.device.index) != 90) return false;
    if (p.dropout.any() && p.alibi_slopes) return false;  // no kernel has both
    // Whether the copy engine can move queries that are not packed depends on a batch's stride.
    if (p.batch_invariant && !p.cu_seqlens_q) return false;
    if (p.num_splits != 0 || !(p.softmax_scale > 0.0f) || p.seqlen_q == 0 || p.seqlen_k == 0) return false;
    const int64_t row_tiles =
        num_row_tiles(p, instance->tiles.warpgroups * instance->tiles.ctas, choose_heads(p));
    // Where keys cannot be shared out so that half of the SMs have work, the forward kernel does it.
    const int32_t splits = may_split(p, instance->tiles) ? kMaxSm90Splits : 1;
    const bool idle = 2 * row_tiles * splits <= num_sms(p.device.index) && !p.batch_invariant;
    if (p.paged() && (idle || box_keys(p, instance->tiles) % 8 != 0)) return false;
    const Operands operands(p);
    return row_tiles + int64_t{p.num_q_heads} * p.batch < kMaxIndex && operands.q.movable(p.dtype) &&
           operands.out.movable(p.dtype) && operands.k.movable(p.dtype) && operands.v.movable(p.dtype);
}

void sm90_attention(const AttentionParams& p, cudaStream_t stream) {
    const Instance& instance = *choose_instance(p);
    Sm90Launch plan{};
    plan.heads = choose_heads(p);
    plan.tokens = kGroupRows / plan.heads;
    plan.page_size = FastDivide::by(std::max(p.page_size, 1));
    plan.box_keys = box_keys(p, instance.tiles);
    plan.few_rows = may_have_few_rows(p, instance.tiles, plan.heads);
    const Operands operands(p);
    plan.q_edge = operands.q.edge;
    plan.k_edge = operands.k.edge;
    plan.q = operands.q.map(p.head_dim, plan.heads, plan.tokens);
    plan.out = operands.out.map(p.head_dim, plan.heads, plan.tokens);
    plan.k = operands.k.map(p.head_dim, 1, plan.box_keys);
    plan.v = operands.v.map(p.head_dim, 1, plan.box_keys);

    const int32_t units_a_sequence = p.num_q_heads / plan.heads;
    const int32_t tile_blocks = instance.tiles.ctas * instance.tiles.warpgroups;
    const int32_t num_clusters = num_sms(p.device.index) / instance.tiles.ctas;
    plan.num_units = p.batch * units_a_sequence;
    plan.num_row_tiles = static_cast<int32_t>(round_up_divide(p.seqlen_q, tile_blocks * plan.tokens));
    plan.section = choose_section(p, plan, num_clusters);
    plan.first_section = (plan.num_units - 1) % plan.section + 1;

    const int64_t row_tiles = num_row_tiles(p, tile_blocks, plan.heads);
    choose_splits(p, instance.tiles, row_tiles, plan);
    const int64_t cut = plan.num_splits > 0 ? row_tiles - plan.num_whole : 0;  // row tiles
    const int64_t parts = cut * plan.num_splits * plan.split_blocks;
    const PersistentWorkspace workspace = persistent_workspace(
        p.device.index, stream, partial_bytes(instance.tiles, parts), 1 + cut * plan.split_blocks);
    plan.counter = reinterpret_cast<int32_t*>(workspace.counters);
    plan.arrivals = workspace.counters + 1;
    plan.partial = static_cast<float*>(workspace.partial);
    const int64_t items = row_tiles + cut * (plan.num_splits - 1);
    const int64_t num_ctas = instance.tiles.ctas * std::min<int64_t>(items, num_clusters);
    instance.launch(p, plan, static_cast<int32_t>(num_ctas), stream);
}

}  // namespace octavo::cuda
