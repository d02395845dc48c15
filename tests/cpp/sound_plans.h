// What has to hold for a plan, whatever the problem: one expect_sound for each kernel's plan.
#pragma once

#include "cuda/backend.h"
#include "cuda/decode/plain_calls.h"
#include "plan_testing.h"

#include <algorithm>
#include <tuple>
#include <variant>

namespace octavo {

// What every launch has to hold.
inline void expect_launchable(const KernelPlan& plan, const AttentionParams& p, const Gpu& gpu) {
    const cuda::Grid grid = std::visit([](const auto& plan) { return plan.grid(); }, plan);
    EXPECT_GE(std::min({grid.x, grid.y, grid.z}), 1);
    EXPECT_LT(grid.x, int64_t{1} << 31);
    EXPECT_LT(std::max(grid.y, grid.z), 1 << 16);
    EXPECT_GE(cuda::num_sequences(plan), 1);
    EXPECT_LE(cuda::num_sequences(plan), p.batch);
    EXPECT_GE(std::visit([](const auto& plan) { return plan.workspace_bytes(); }, plan), 0);
    EXPECT_TRUE(plan == cuda::plan_kernel(p, gpu)) << "the same problem again";
}

// A row's partial result in the workspace of the decode kernels, in words: its columns, then two words of the
// softmax state for each warp that may read it.
inline int64_t partial_row(const cuda::DecodeTiles& tiles, int32_t threads) {
    return tiles.head_dim + 2 * (threads / 32);
}

// That the instance of a decode kernel has room for rows of keys and of values, and for codes that it can
// move 16 bytes of them at a time.
template <class Plan>
inline void expect_holds(const Plan& plan, const AttentionParams& p) {
    EXPECT_GE(plan.tiles().head_dim, std::max(p.head_dim, p.head_dim_v));
    if (plan.codes == cuda::Codes::none) return;
    EXPECT_EQ(p.head_dim * cuda::bits_of(p.k_dtype) % 128, 0);
    EXPECT_EQ(p.head_dim_v * cuda::bits_of(p.v_dtype) % 128, 0);
}

// The call whose KV heads are those of a decode plan. More than one part has whole query heads of a group
// that no instance takes.
template <class Plan>
AttentionParams in_parts(const Plan& plan, const AttentionParams& call) {
    if (plan.group_parts > 1) {
        EXPECT_EQ(call.group_size() % plan.group_parts, 0);
        EXPECT_GT(call.group_size(), plan.tiles().rows());
        EXPECT_TRUE(is_code(call.k_dtype) && !call.chosen_pages);
        EXPECT_GT(plan.tiles().head_dim, 128) << "instances of others take no parts";
    }
    return cuda::with_group_parts(call, plan.group_parts);
}

inline void expect_sound(const cuda::SplitKvPlan& plan, const AttentionParams& call, const Gpu& gpu) {
    const AttentionParams p = in_parts(plan, call);
    expect_holds(plan, p);
    const int64_t rows = int64_t{p.seqlen_q} * p.group_size(), splits = plan.num_splits;
    const int64_t block_keys = plan.codes == cuda::Codes::none ? 16 : 32;
    const int64_t blocks = (int64_t{p.seqlen_k} + block_keys - 1) / block_keys, warps = plan.threads / 32;
    EXPECT_LE(rows, plan.tiles().rows());
    EXPECT_FALSE(p.alibi_symmetric || p.ranges);
    EXPECT_TRUE(p.attention_chunk.divisor == 0 || p.seqlen_q <= 1) << "other queries may see other chunks";
    if (cuda::is_plain(p)) {
        EXPECT_FALSE(p.attention_chunk.divisor > 0 || p.has_head_numbers || p.softmax_phi_of_heads ||
                     p.tree_mask)
            << "its instance leaves these out";
    }
    EXPECT_GE(splits, 1);
    EXPECT_EQ(plan.policy == cuda::SplitPolicy::fixed, p.batch_invariant);
    EXPECT_TRUE(p.batch_invariant || p.window_left < 0 || !p.prefix_lens)
        << "blocks that do not follow each other are taken in turns";

    // What queries see.
    if (p.window_left < 0 || p.prefix_lens) {
        EXPECT_EQ(plan.max_visible_blocks, blocks);
    } else {  // as many keys that follow each other, of which the first may be the last of a block
        const int64_t keys = int64_t{p.window_left} + p.seqlen_q;
        EXPECT_GE(plan.max_visible_blocks, std::min(blocks, (keys + block_keys - 2) / block_keys + 1));
        EXPECT_LE(plan.max_visible_blocks, std::min(blocks, keys / block_keys + 2));
    }
    const bool shares_out_by_length =
        plan.policy == cuda::SplitPolicy::by_length || plan.policy == cuda::SplitPolicy::sized;
    if (shares_out_by_length || p.window_left >= 0 || p.prefix_lens) {
        EXPECT_TRUE(plan.length_first) << "what a CTA has to do follows from it";
    }

    // CTAs, and how many of them leave partial results: the workspace follows from the SMs alone.
    const int64_t ctas = int64_t{plan.num_kv_heads} * plan.num_slots;
    int64_t most_ctas = gpu.num_sms;  // of a launch with several splits an item
    switch (plan.policy) {
        case cuda::SplitPolicy::even: break;
        case cuda::SplitPolicy::by_length:
            EXPECT_LE(plan.num_sequences, cuda::kMaxSequencesByLength);
            EXPECT_GE(plan.num_slots, plan.num_sequences);
            EXPECT_LE(plan.num_slots, plan.num_sequences * splits);
            break;
        case cuda::SplitPolicy::sized:
            EXPECT_GT(splits, 1);
            EXPECT_LE(splits, plan.max_visible_blocks);
            EXPECT_GE(splits * plan.blocks_per_split, plan.max_visible_blocks);
            most_ctas = 16 * gpu.num_sms;
            break;
        case cuda::SplitPolicy::fixed:
            EXPECT_LE(splits, 1 << plan.max_fixed_splits_log2);
            EXPECT_LE(splits, std::max(128 / plan.num_kv_heads, 1));
            most_ctas = 64 * gpu.num_sms;
            break;
    }
    if (plan.policy != cuda::SplitPolicy::by_length) {
        EXPECT_EQ(plan.num_slots, plan.num_sequences * splits);
    }
    if (splits == 1) {
        EXPECT_EQ(plan.combiners_per_item, 0);
        EXPECT_EQ(plan.workspace_bytes(), 0);
        return;
    }
    EXPECT_LE(ctas, most_ctas);
    EXPECT_EQ(plan.partial_words, rows * partial_row(plan.tiles(), plan.threads));
    EXPECT_EQ(plan.workspace_bytes(), ctas * plan.partial_words * 4);

    // Combiners: every row has its warps, a power of two of those of one CTA.
    const int64_t rows_per_combiner = warps >> plan.warps_per_row_log2;
    const int64_t combiners = std::max(plan.combiners_per_item, 1);  // or the last split
    EXPECT_TRUE(plan.combiners_per_item > 0 || plan.policy < cuda::SplitPolicy::sized);
    EXPECT_GE(combiners * rows_per_combiner, rows);
    EXPECT_LT((combiners - 1) * rows_per_combiner, rows);
    if (plan.policy == cuda::SplitPolicy::fixed) {
        EXPECT_GE(8 << plan.warps_per_row_log2, splits) << "a lane adds up to eight, once";
    }
}

inline void expect_sound_alone(const cuda::StreamKPlan& plan, const AttentionParams& call, const Gpu& gpu) {
    const AttentionParams p = in_parts(plan, call);
    EXPECT_FALSE(p.batch_invariant || p.alibi_symmetric || p.ranges);
    EXPECT_TRUE(p.attention_chunk.divisor == 0 || p.seqlen_q <= 1) << "other queries may see other chunks";
    expect_holds(plan, p);
    EXPECT_EQ(plan.num_ctas, std::min(gpu.num_sms, cuda::kMaxDecodeCtas));
    EXPECT_EQ(plan.partial_words, p.seqlen_q * p.group_size() * partial_row(plan.tiles(), plan.threads));
    EXPECT_EQ(plan.workspace_bytes(), int64_t{plan.num_ctas} * plan.partial_words * 4);
}
inline void expect_sound(const cuda::StreamKPlan& plan, const AttentionParams& p, const Gpu& gpu) {
    expect_sound_alone(plan, p, gpu);
    EXPECT_FALSE(cuda::plan_split_kv(p, gpu)) << "it is for what split-KV does not serve";
}

inline void expect_sound(const cuda::Sm90Plan& plan, const AttentionParams& p, const Gpu& gpu) {
    EXPECT_EQ(gpu.compute_capability, 90);
    EXPECT_EQ(p.alibi_symmetric, plan.feature == cuda::Sm90Feature::symmetric_alibi);
    if (p.alibi_symmetric) {
        EXPECT_TRUE(
            cuda::has_symmetric_alibi(plan.tiles().head_dim, plan.tiles().value_dim, plan.tiles().ctas))
            << "no such instance";
    }
    EXPECT_GE(plan.tiles().head_dim, p.head_dim);
    EXPECT_GE(plan.tiles().value_dim, p.head_dim_v);
    EXPECT_EQ((plan.tiles().head_dim + 63) / 64, (p.head_dim + 63) / 64) << "a copy of no column";
    EXPECT_EQ((plan.tiles().value_dim + 63) / 64, (p.head_dim_v + 63) / 64) << "a copy of no column";
    EXPECT_EQ(p.group_size() % plan.heads, 0);
    EXPECT_LE(plan.heads * plan.tokens, 64);
    EXPECT_LE(plan.num_ctas, gpu.num_sms);
    EXPECT_EQ(plan.num_ctas % plan.tiles().ctas, 0);
    if (plan.gathers) {
        EXPECT_EQ(plan.codes, cuda::Codes::none);
        EXPECT_TRUE(p.paged() && p.page_size % (p.head_dim <= 128 ? 8 : 16) != 0)
            << "the copy engine would be faster";
        EXPECT_FALSE(p.alibi_slopes || p.ranges || p.block_mask || p.dropout.any());
        EXPECT_EQ(plan.tiles().ctas, 1) << "no other row has these instances";
    } else if (plan.codes == cuda::Codes::none) {
        EXPECT_EQ(plan.tiles().keys % plan.box_keys, 0);
        EXPECT_TRUE(!p.paged() || plan.box_keys % 8 == 0) << "the copy engine brings eight keys at least";
        EXPECT_TRUE(p.paged() || plan.box_keys * plan.tiles().ctas == plan.tiles().keys)
            << "the CTAs of a pair bring their shares of a tile";
    }
    EXPECT_GE(plan.order.first_section, 1);
    EXPECT_LE(plan.order.first_section, plan.order.section);
    EXPECT_EQ((plan.order.num_units - plan.order.first_section) % plan.order.section, 0)
        << "sections after the first are whole";
    if (!p.cu_seqlens_q) {
        const int64_t unit_rows =
            int64_t{plan.order.unit_row_tiles} * plan.tiles().row_blocks() * plan.tokens;
        EXPECT_EQ(int64_t{plan.order.num_units} * plan.order.unit_row_tiles, plan.num_row_tiles);
        EXPECT_GE(unit_rows, p.seqlen_q) << "some queries have no row tile";
    }
    EXPECT_GE(plan.num_row_tiles * plan.tiles().row_blocks() * plan.tokens * plan.heads,
              p.total_q * p.num_q_heads)
        << "some queries have no row tile";
    if (p.block_mask) {
        EXPECT_EQ(plan.tiles().keys, p.block_mask.size);
        EXPECT_EQ(plan.heads, 1) << "a warpgroup's rows are of one block";
    }
    EXPECT_EQ(p.has_tree_mask, plan.feature == cuda::Sm90Feature::tree);
    if (plan.codes != cuda::Codes::none) {
        EXPECT_EQ(p.head_dim, p.head_dim_v) << "its tiles are of one head dim";
        EXPECT_EQ(p.head_dim * cuda::bits_of(p.k_dtype) % 128, 0) << "it loads 16 bytes of codes at a time";
        EXPECT_EQ(p.head_dim * cuda::bits_of(p.v_dtype) % 128, 0) << "it loads 16 bytes of codes at a time";
    } else if (p.has_tree_mask || p.ranges) {
        const cuda::Sm90Tiles& tiles = plan.tiles();
        EXPECT_TRUE(cuda::is_first_row(tiles.head_dim, tiles.value_dim, tiles.warpgroups, tiles.ctas))
            << "no other row has these instances";
    }
    if (plan.may_split() && plan.codes == cuda::Codes::none) {
        EXPECT_TRUE(cuda::has_splits(plan.tiles().head_dim, plan.tiles().value_dim, plan.tiles().ctas));
    }
    if (plan.by_length) {
        EXPECT_TRUE(p.paged() && p.batch > 1 && plan.codes == cuda::Codes::none);
        EXPECT_EQ(p.most_queries, 0) << "the pages of a part of the batch say nothing";
        EXPECT_FALSE(p.batch_invariant) << "what a sequence is cut into depends on the others";
        EXPECT_GE(plan.split_blocks, 1);
    }
    if (p.ranges) {
        EXPECT_EQ(plan.feature,
                  plan.may_split() ? cuda::Sm90Feature::split_ranges : cuda::Sm90Feature::ranges);
    } else if (!p.has_tree_mask) {
        EXPECT_EQ(plan.may_split(), plan.feature == cuda::Sm90Feature::splits);
    }
    if (!plan.may_split()) {
        EXPECT_EQ(plan.partial_bytes, 0);
        return;
    }
    EXPECT_TRUE(p.paged() && !p.batch_invariant) << "only there may bits depend on the batch";
    // Whether splits are cut by length or not, each has room for its results: 64 rows and the softmax states
    // of these, and a counter, for each warpgroup that has some. One more counter hands out the work.
    const int64_t by_length = plan.by_length ? std::min<int64_t>(plan.num_row_tiles * cuda::kMaxSm90Splits,
                                                                 cuda::kMostSm90SplitsACta * plan.num_ctas)
                                             : 0;
    const int64_t even = plan.num_splits > 0 ? (plan.num_row_tiles - plan.num_whole) * plan.num_splits : 0;
    const int64_t partials = std::max(by_length, even) * plan.split_blocks;
    EXPECT_GE(plan.partial_bytes, partials * 64 * (plan.tiles().value_dim + 2) * 4);
    EXPECT_GE(plan.num_counters, 1 + partials);
    EXPECT_LE(plan.num_splits, cuda::kMaxEvenSm90Splits);
    if (plan.num_splits == 0) return;
    EXPECT_EQ(plan.num_whole % gpu.num_sms, 0);
    EXPECT_LE((plan.num_row_tiles - plan.num_whole) * plan.num_splits, 4 * gpu.num_sms);
}

inline void expect_sound(const cuda::Sm90WidePlan& plan, const AttentionParams& p, const Gpu& gpu) {
    using Config = cuda::Sm90WideConfig;
    constexpr int64_t kBlocks = Config::kTileBlocks;
    EXPECT_EQ(gpu.compute_capability, 90);
    EXPECT_EQ(p.head_dim, p.head_dim_v);
    EXPECT_EQ((p.head_dim + 63) / 64, Config::kHeadDim / 64) << "a copy of no column";
    EXPECT_FALSE(p.alibi_slopes || p.ranges || p.has_tree_mask || p.block_mask || p.dropout.any());
    EXPECT_EQ(p.group_size() % plan.heads, 0);
    EXPECT_LE(plan.heads * plan.tokens, 64);
    EXPECT_LE(plan.num_ctas, gpu.num_sms);
    EXPECT_EQ(plan.num_ctas % Config::kCtas, 0);
    EXPECT_EQ(Config::kKeys % plan.box_keys, 0);
    EXPECT_EQ(plan.box_keys % 8, 0) << "the copy engine brings eight keys at least";
    const cuda::Sm90Order& order = plan.order;
    EXPECT_GE(order.first_section, 1);
    EXPECT_EQ((order.num_units - order.first_section) % order.section, 0);
    if (!p.cu_seqlens_q) {
        EXPECT_EQ(int64_t{order.num_units} * order.unit_row_tiles, plan.num_row_tiles);
        EXPECT_GE(order.unit_row_tiles * kBlocks * plan.tokens, p.seqlen_q);
    }
    EXPECT_GE(plan.num_row_tiles * kBlocks * plan.tokens * plan.heads, p.total_q * p.num_q_heads)
        << "some queries have no row tile";
}

inline void expect_sound(const cuda::Sm80Plan& plan, const AttentionParams& p, const Gpu& gpu);

inline void expect_sound(const cuda::ExpandedPlan& plan, const AttentionParams& p, const Gpu& gpu) {
    EXPECT_TRUE(is_code(p.k_dtype) && is_code(p.v_dtype));
    EXPECT_EQ(p.head_dim, p.head_dim_v);
    EXPECT_FALSE(p.batch_invariant) << "whether there is workspace depends on the batch";
    EXPECT_LE(p.head_dim, cuda::kExpandColumns * cuda::kExpandPasses * plan.lanes);
    EXPECT_GE(int64_t{plan.num_runs} * plan.run_tokens(), p.seqlen_k) << "some keys stay codes";
    EXPECT_GE(plan.num_turns, 1);
    EXPECT_LE(plan.num_turns, plan.num_runs);
    EXPECT_GE(plan.room, p.seqlen_k);
    EXPECT_LT(plan.room, p.seqlen_k + plan.attention.tiles().keys);
    EXPECT_EQ(plan.attention.box_keys, plan.attention.tiles().keys) << "a copy for a tile";
    EXPECT_LE(plan.workspace_bytes(), cuda::kMaxExpandedBytes + (int64_t{128} << 20)) << "tiles rounded up";
    AttentionParams written = p;
    written.static_past = true;
    AttentionParams over_numbers =
        cuda::over_expanded(written, plan.num_slots, plan.room, cuda::kSomeWorkspace);
    EXPECT_FALSE(over_numbers.static_past) << "the launch in front writes what it reads";
    EXPECT_FALSE(over_numbers.k_scales.data || over_numbers.v_scales.data);
    EXPECT_EQ(over_numbers.page_table.data - static_cast<const int32_t*>(cuda::kSomeWorkspace),
              2 * plan.tensor_bytes / 4);
    EXPECT_GE(plan.tensor_bytes, 2 * int64_t{plan.num_slots} * plan.room * p.num_kv_heads * p.head_dim);
    EXPECT_EQ(plan.table_bytes, 4 * int64_t{plan.num_sequences}) << "each has a slot, or says it has none";
    EXPECT_EQ(over_numbers.num_pages, plan.num_slots);
    for (const auto& [page, token, head] :
         {std::tuple(over_numbers.k_outer_stride, over_numbers.k_token_stride, over_numbers.k_head_stride),
          {over_numbers.v_outer_stride, over_numbers.v_token_stride, over_numbers.v_head_stride}}) {
        EXPECT_EQ(token, p.head_dim);
        EXPECT_GE(head, plan.room * token) << "heads would overlap";
        EXPECT_GE(page, p.num_kv_heads * head) << "slots would overlap";
        EXPECT_LE(2 * plan.num_slots * page, plan.tensor_bytes);
    }
    EXPECT_EQ(plan.attention.codes, cuda::Codes::none);
    over_numbers.batch = plan.num_slots;
    over_numbers.total_q = std::min(p.total_q, int64_t{plan.num_slots} * p.seqlen_q);
    if (!plan.is_mixed()) {
        EXPECT_EQ(plan.num_slots, plan.num_sequences);
        if (p.head_dim <= 128) {
            EXPECT_EQ(plan.num_slots, p.batch) << "others would follow";
        }
        EXPECT_FALSE(plan.few || plan.between);
        expect_sound(plan.attention, over_numbers, gpu);
        return;
    }
    // Every sequence is in one of three parts of the batch, and as many as there may be of the first have a
    // slot.
    ASSERT_TRUE(p.cu_seqlens_q && plan.few && plan.between);
    EXPECT_LT(plan.few_queries, plan.many_queries);
    EXPECT_LE(plan.many_queries, p.seqlen_q) << "no sequence is converted";
    EXPECT_LE(plan.num_slots, p.batch);
    EXPECT_TRUE(plan.num_slots == p.batch || (plan.num_slots + 1) * int64_t{plan.many_queries} > p.total_q);
    auto part = [&p](int32_t fewest, int32_t most) {
        AttentionParams part = cuda::with_queries(p, fewest, most);
        part.total_q = std::min(p.total_q, int64_t{p.batch} * most);
        return part;
    };
    const AttentionParams few = part(1, plan.few_queries);
    if (const auto* split_kv = std::get_if<cuda::SplitKvPlan>(&*plan.few)) {
        EXPECT_EQ(split_kv->num_sequences, p.batch) << "in one launch";
        EXPECT_NE(split_kv->policy, cuda::SplitPolicy::by_length) << "its CTAs know no parts of batches";
        expect_sound(*split_kv, few, gpu);
    } else {
        const auto& stream_k = std::get<cuda::StreamKPlan>(*plan.few);
        EXPECT_EQ(stream_k.num_sequences, p.batch) << "in one launch";
        expect_sound_alone(stream_k, few, gpu);
    }
    const AttentionParams between = part(plan.few_queries + 1, plan.many_queries - 1);
    std::visit([&](const auto& plan) { expect_sound(plan, between, gpu); }, *plan.between);
    if (const auto* sm80 = std::get_if<cuda::Sm80Plan>(&*plan.between)) {
        EXPECT_GT(p.head_dim, 128) << "a kernel of Hopper's reads codes";
        EXPECT_EQ(sm80->num_splits, 1) << "what combines splits writes the rows of all sequences";
    }
    EXPECT_TRUE(plan.sms_left == 0 || std::holds_alternative<cuda::SplitKvPlan>(*plan.few))
        << "others wait for the kernel before";
    EXPECT_GE(plan.sms_left, 0);
    EXPECT_GE(plan.attention.num_ctas, 1);
    cuda::Sm90Plan attention = plan.attention;
    attention.num_ctas += plan.sms_left;
    expect_sound(attention, over_numbers, gpu);
}

inline void expect_sound(const cuda::DividedPlan& plan, const AttentionParams& p, const Gpu& gpu) {
    EXPECT_TRUE(is_code(p.k_dtype) && is_code(p.v_dtype));
    EXPECT_FALSE(p.batch_invariant) << "whether parts pay depends on the batch";
    ASSERT_TRUE(p.cu_seqlens_q && p.seq_lens);
    EXPECT_TRUE(p.window_right == 0 && !p.prefix_lens && !p.has_tree_mask && !p.chosen_pages && !p.ranges)
        << "what a query sees does not follow from its position alone";
    EXPECT_GE(plan.parts, 2);
    EXPECT_LE(plan.parts, p.head_dim > 128 || p.head_dim_v != p.head_dim ? cuda::kMostParts : 2);
    EXPECT_GE(plan.parts * plan.part_queries, p.seqlen_q) << "some queries are in no part";
    EXPECT_LT((plan.parts - 1) * plan.part_queries, p.seqlen_q) << "some parts are empty in all sequences";
    EXPECT_LE(plan.workspace_bytes(), cuda::kMaxDividedBytes);
    AttentionParams served = p;
    served.batch = plan.num_sequences;
    served.static_past = true;
    const AttentionParams parts =
        cuda::over_parts(served, plan.parts, plan.part_queries, cuda::kSomeWorkspace);
    EXPECT_FALSE(parts.static_past) << "the launch in front writes what it reads";
    EXPECT_GE(parts.page_table_stride * p.page_size, p.seqlen_k);
    EXPECT_LT((parts.page_table_stride - 1) * p.page_size, p.seqlen_k) << "a column that no key is in";
    const int32_t* const end = parts.page_table.data + parts.batch * parts.page_table_stride;
    EXPECT_EQ(4 * (end - static_cast<const int32_t*>(cuda::kSomeWorkspace)), plan.workspace_bytes());
    if (const auto* split_kv = std::get_if<cuda::SplitKvPlan>(&plan.decode)) {
        EXPECT_EQ(split_kv->num_sequences, parts.batch) << "in one launch";
        expect_sound(*split_kv, parts, gpu);
    } else {
        const auto& stream_k = std::get<cuda::StreamKPlan>(plan.decode);
        EXPECT_EQ(stream_k.num_sequences, parts.batch) << "in one launch";
        expect_sound_alone(stream_k, parts, gpu);
    }
}

inline void expect_sound(const cuda::Sm80Plan& plan, const AttentionParams& p, const Gpu& gpu) {
    EXPECT_GE(plan.tiles().head_dim, std::max(p.head_dim, p.head_dim_v));
    EXPECT_GE(int64_t{plan.num_row_tiles} * plan.tiles().rows(), p.total_q * p.group_size())
        << "some queries have no row tile";
    EXPECT_GE(gpu.shared_bytes_per_block, static_cast<int64_t>(cuda::sm80_shared_bytes(plan.tiles().stages)));
    const int64_t rows = p.total_q * p.num_q_heads, splits = plan.num_splits > 1 ? plan.num_splits : 0;
    EXPECT_EQ(plan.workspace_bytes(), splits * rows * (p.head_dim_v + 1) * 4) << "results and their LSE";
    if (p.num_splits > 0) {
        EXPECT_EQ(plan.num_splits, p.num_splits);
    } else {
        EXPECT_TRUE(plan.num_splits == 1 || (p.paged() && !p.batch_invariant))
            << "only there may bits depend on the batch";
        EXPECT_TRUE(plan.num_splits == 1 || plan.grid().size() <= 2 * gpu.num_sms);
    }
}

}  // namespace octavo
