// What holds for the plans of all problems, on thousands of random ones.
#include "cuda/backend.h"
#include "cuda/decode/plain_calls.h"
#include "plan_testing.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <new>
#include <set>
#include <string>
#include <variant>
#include <vector>

// Counted, since a call may not allocate to make its plan. Not inlined, since GCC would see mismatches.
static std::atomic<int64_t> num_allocations{0};
[[gnu::noinline]] void* operator new(std::size_t bytes) {
    ++num_allocations;
    if (void* const memory = std::malloc(bytes)) return memory;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace octavo {
namespace {

const char* const kGpus[] = {"a100", "l40s", "h100", "h200", "b200", "rtx5090"};

// What every launch has to hold.
void expect_launchable(const KernelPlan& plan, const AttentionParams& p, const Gpu& gpu) {
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
int64_t partial_row(const cuda::DecodeTiles& tiles, int32_t threads) {
    return tiles.head_dim + 2 * (threads / 32);
}

// That the instance of a decode kernel has room for rows of keys and of values, and for codes that it can
// move 16 bytes of them at a time.
template <class Plan>
void expect_holds(const Plan& plan, const AttentionParams& p) {
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

void expect_sound(const cuda::SplitKvPlan& plan, const AttentionParams& call, const Gpu& gpu) {
    const AttentionParams p = in_parts(plan, call);
    expect_holds(plan, p);
    const int64_t rows = int64_t{p.seqlen_q} * p.group_size(), splits = plan.num_splits;
    const int64_t block_keys = plan.codes == cuda::Codes::none ? 16 : 32;
    const int64_t blocks = (int64_t{p.seqlen_k} + block_keys - 1) / block_keys, warps = plan.threads / 32;
    EXPECT_LE(rows, plan.tiles().rows());
    EXPECT_FALSE(p.alibi_symmetric || p.ranges);
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

void expect_sound_alone(const cuda::StreamKPlan& plan, const AttentionParams& call, const Gpu& gpu) {
    const AttentionParams p = in_parts(plan, call);
    EXPECT_FALSE(p.batch_invariant || p.alibi_symmetric || p.ranges);
    expect_holds(plan, p);
    EXPECT_EQ(plan.num_ctas, std::min(gpu.num_sms, cuda::kMaxDecodeCtas));
    EXPECT_EQ(plan.partial_words, p.seqlen_q * p.group_size() * partial_row(plan.tiles(), plan.threads));
    EXPECT_EQ(plan.workspace_bytes(), int64_t{plan.num_ctas} * plan.partial_words * 4);
}
void expect_sound(const cuda::StreamKPlan& plan, const AttentionParams& p, const Gpu& gpu) {
    expect_sound_alone(plan, p, gpu);
    EXPECT_FALSE(cuda::plan_split_kv(p, gpu)) << "it is for what split-KV does not serve";
}

void expect_sound(const cuda::Sm90Plan& plan, const AttentionParams& p, const Gpu& gpu) {
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
    if (plan.codes == cuda::Codes::none) {
        EXPECT_EQ(plan.tiles().keys % plan.box_keys, 0);
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
        EXPECT_FALSE(p.batch_invariant) << "what a sequence is cut into depends on the others";
        EXPECT_GE(plan.split_blocks, 1);
        EXPECT_GT(plan.num_counters, std::min<int64_t>(plan.num_row_tiles * cuda::kMaxSm90Splits,
                                                       cuda::kMostSm90SplitsACta * plan.num_ctas));
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
    if (plan.num_splits == 0) return;
    EXPECT_EQ(plan.num_whole % gpu.num_sms, 0);
    EXPECT_LE((plan.num_row_tiles - plan.num_whole) * plan.num_splits, 4 * gpu.num_sms);
}

void expect_sound(const cuda::Sm90WidePlan& plan, const AttentionParams& p, const Gpu& gpu) {
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

void expect_sound(const cuda::Sm80Plan& plan, const AttentionParams& p, const Gpu& gpu);

void expect_sound(const cuda::ExpandedPlan& plan, const AttentionParams& p, const Gpu& gpu) {
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
    AttentionParams over_numbers = cuda::over_expanded(p, plan.num_slots, plan.room, cuda::kSomeWorkspace);
    EXPECT_EQ(over_numbers.page_table.data - static_cast<const int32_t*>(cuda::kSomeWorkspace),
              2 * plan.tensor_bytes / 4);
    EXPECT_GE(plan.tensor_bytes, 2 * int64_t{plan.num_slots} * plan.room * p.num_kv_heads * p.head_dim);
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

void expect_sound(const cuda::DividedPlan& plan, const AttentionParams& p, const Gpu& gpu) {
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
    const AttentionParams parts =
        cuda::over_parts(served, plan.parts, plan.part_queries, cuda::kSomeWorkspace);
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

void expect_sound(const cuda::Sm80Plan& plan, const AttentionParams& p, const Gpu& gpu) {
    EXPECT_GE(plan.tiles().head_dim, std::max(p.head_dim, p.head_dim_v));
    EXPECT_GE(int64_t{plan.num_row_tiles} * plan.tiles().rows(), p.total_q * p.group_size())
        << "some queries have no row tile";
    EXPECT_GE(gpu.shared_bytes_per_block, static_cast<int64_t>(cuda::sm80_shared_bytes(plan.tiles().stages)));
    EXPECT_EQ(plan.workspace_bytes() > 0, plan.num_splits > 1);
    if (p.num_splits > 0) {
        EXPECT_EQ(plan.num_splits, p.num_splits);
    } else {
        EXPECT_TRUE(plan.num_splits == 1 || (p.paged() && !p.batch_invariant))
            << "only there may bits depend on the batch";
        EXPECT_TRUE(plan.num_splits == 1 || plan.grid().size() <= 2 * gpu.num_sms);
    }
}

// The folder of a kernel: kernels of one folder give a sequence the same bits where these do not depend on
// the batch.
std::string family_of(const KernelPlan& plan) {
    if (std::holds_alternative<cuda::Sm90Plan>(plan)) return "sm90_attention";
    if (std::holds_alternative<cuda::Sm90WidePlan>(plan)) return "sm90_wide_attention";
    if (std::holds_alternative<cuda::ExpandedPlan>(plan)) return "expand_codes";
    if (std::holds_alternative<cuda::DividedPlan>(plan)) return "divide_queries";
    return std::holds_alternative<cuda::Sm80Plan>(plan) ? "sm80_attention" : "decode";
}

// The plans of all launches of a call.
std::vector<KernelPlan> launches_of(const AttentionParams& params, const Gpu& gpu) {
    std::vector<KernelPlan> plans;
    const AttentionPlan plan = cuda::plan_attention(params, gpu);
    if (const auto* shared = std::get_if<cuda::SharedPrefixPlan>(&plan)) {
        EXPECT_EQ(shared->num_runs, (params.shared_prefix_len - 1) / shared->run_len + 1);
        EXPECT_EQ(shared->run_len % params.page_size, 0);
        EXPECT_LE(shared->num_runs, cuda::kMaxPrefixRuns);
        if (shared->overlaps) {
            EXPECT_TRUE(std::holds_alternative<cuda::SplitKvPlan>(shared->behind_prefix));
            EXPECT_EQ(cuda::num_sequences(shared->behind_prefix), params.batch) << "in one launch";
        }
        EXPECT_TRUE(plan == cuda::plan_attention(params, gpu)) << "the same problem again";
        return {shared->over_prefix, shared->behind_prefix};
    }
    if (std::holds_alternative<cuda::NothingToDo>(plan)) return {};
    for (AttentionParams p = params; p.batch > 0; p.batch -= cuda::num_sequences(plans.back())) {
        p.total_q = std::min(p.total_q, int64_t{p.batch} * p.seqlen_q);
        plans.push_back(cuda::plan_kernel(p, gpu));
        expect_launchable(plans.back(), p, gpu);
        std::visit([&](const auto& plan) { expect_sound(plan, p, gpu); }, plans.back());
        if (testing::Test::HasFailure()) break;
    }
    return plans;
}

template <class Args>
std::vector<KernelPlan> launches_of(const Args& args, const char* gpu) {
    return launches_of(checked(args), *cuda::find_gpu(gpu));
}

// What an instance is made of, all that has a kernel of its own; of decode over codes the instance alone.
std::string kernel_of(const KernelPlan& plan) {
    const Explanation text = cuda::describe(plan);
    std::string name = text.kernel;
    const auto* const split_kv = std::get_if<cuda::SplitKvPlan>(&plan);
    if (split_kv && split_kv->codes == cuda::Codes::none)
        name += " " + field(text, "policy") + " " + field(text, "items");
    if (std::holds_alternative<cuda::Sm90Plan>(plan)) name += " " + field(text, "feature");
    if (std::holds_alternative<cuda::Sm80Plan>(plan)) name += " feature " + field(text, "feature");
    return name;
}

// All kernels that are compiled.
std::set<std::string> all_kernels() {
    std::set<std::string> names;
    auto add = [&names](auto plan, DType dtype, size_t row) {
        plan.dtype = dtype;
        plan.row = static_cast<int32_t>(row);
        names.insert(kernel_of(plan));
    };
    auto add_decode = [&add](cuda::Codes codes, DType dtype) {
        for (size_t row = 0; row < std::size(cuda::kDecodeTiles); ++row) {
            const cuda::DecodeTiles& tiles = cuda::kDecodeTiles[row];
            if (codes != cuda::Codes::none && !tiles.has_codes) continue;
            const bool has_short_items = tiles.row_tiles == 1 && tiles.head_dim <= 128;
            using cuda::SplitKvItems, cuda::SplitPolicy;
            auto add_split_kv = [&](SplitPolicy policy, SplitKvItems items, DType dtype, size_t row) {
                cuda::SplitKvPlan plan{};
                plan.codes = codes;
                plan.group_parts = 1;
                plan.policy = policy;
                plan.items = items;
                add(plan, dtype, row);
            };
            add_split_kv(SplitPolicy::even, SplitKvItems::long_items, dtype, row);
            if (has_short_items) add_split_kv(SplitPolicy::even, SplitKvItems::short_items, dtype, row);
            add_split_kv(SplitPolicy::even, SplitKvItems::many_items, dtype, row);
            add_split_kv(SplitPolicy::by_length, SplitKvItems::long_items, dtype, row);
            add_split_kv(SplitPolicy::sized,
                         has_short_items ? SplitKvItems::short_items : SplitKvItems::many_items, dtype, row);
            add_split_kv(SplitPolicy::fixed, SplitKvItems::long_items, dtype, row);
            add_split_kv(SplitPolicy::fixed, SplitKvItems::short_items, dtype, row);
            cuda::StreamKPlan stream_k{};
            stream_k.codes = codes;
            stream_k.group_parts = 1;
            add(stream_k, dtype, row);
        }
    };
    // Two types of codes are enough: no plan looks at more than their bits.
    add_decode(cuda::Codes::int8, DType::float16);
    add_decode(cuda::Codes::int4, DType::float16);
    for (const std::string& name : cuda::expand_codes_instances()) names.insert(name);
    names.insert("divide_queries");
    for (const std::string& name : cuda::sm90_wide_attention_instances()) names.insert(name);
    for (DType dtype : cuda::kAttentionTypes) {
        add_decode(cuda::Codes::none, dtype);
        for (size_t row = 0; row < std::size(cuda::kSm90CodeTiles); ++row) {
            cuda::Sm90Plan plan{};
            plan.codes = cuda::Codes::int8;  // one instance for all
            const bool one_block = cuda::kSm90CodeTiles[row].warpgroups == 1;
            for (auto feature :
                 {cuda::Sm90Feature::alibi, cuda::Sm90Feature::few_rows, cuda::Sm90Feature::sinks,
                  cuda::Sm90Feature::splits, cuda::Sm90Feature::tree}) {
                const bool is_sinks = feature == cuda::Sm90Feature::sinks;
                if (feature != cuda::Sm90Feature::splits && is_sinks != one_block) continue;
                plan.feature = feature;
                add(plan, dtype, row);
            }
        }
        for (size_t row = 0; row < std::size(cuda::kSm90Tiles); ++row) {
            const cuda::Sm90Tiles& tiles = cuda::kSm90Tiles[row];
            cuda::Sm90Plan plan{};
            for (auto feature :
                 {cuda::Sm90Feature::none, cuda::Sm90Feature::alibi, cuda::Sm90Feature::dropout,
                  cuda::Sm90Feature::few_rows, cuda::Sm90Feature::softcap, cuda::Sm90Feature::splits,
                  cuda::Sm90Feature::tree, cuda::Sm90Feature::ranges, cuda::Sm90Feature::split_ranges}) {
                if (feature == cuda::Sm90Feature::few_rows &&
                    !cuda::has_few_rows(tiles.warpgroups, tiles.ctas))
                    continue;
                if (feature == cuda::Sm90Feature::splits &&
                    !cuda::has_splits(tiles.head_dim, tiles.value_dim, tiles.ctas))
                    continue;
                const bool of_first_row = feature == cuda::Sm90Feature::tree ||
                                          feature == cuda::Sm90Feature::ranges ||
                                          feature == cuda::Sm90Feature::split_ranges;
                if (of_first_row &&
                    !cuda::is_first_row(tiles.head_dim, tiles.value_dim, tiles.warpgroups, tiles.ctas))
                    continue;
                plan.feature = feature;
                add(plan, dtype, row);
            }
        }
        for (size_t row = 0; row < std::size(cuda::kSm90BlockTiles); ++row) {
            cuda::Sm90Plan plan{};
            plan.feature = cuda::Sm90Feature::blocks;
            plan.block_row = static_cast<int32_t>(row);
            add(plan, dtype, 0);
        }
        for (size_t row = 0; row < std::size(cuda::kSm80Tiles); ++row) {
            cuda::Sm80Plan plan{};
            for (auto feature :
                 {cuda::Sm80Feature::none, cuda::Sm80Feature::dropout, cuda::Sm80Feature::codes,
                  cuda::Sm80Feature::blocks, cuda::Sm80Feature::ranges, cuda::Sm80Feature::code_ranges}) {
                if (cuda::reads_codes(feature) && cuda::kSm80Tiles[row].head_dim > kMaxCudaCodeHeadDim)
                    continue;
                plan.feature = feature;
                add(plan, dtype, row);
            }
        }
    }
    return names;
}

TEST(RandomPlans, AreSoundAndReachEveryKernel) {
    std::set<std::string> unreached = all_kernels();
    size_t num_plans = 0;
    for (unsigned seed = 0; seed < 50000 && !HasFailure(); ++seed) {
        SCOPED_TRACE(seed);
        Random random(seed);
        const bool is_paged = !random.one_in(3);
        const AttentionParams p = is_paged ? checked(random_paged(random, random.one_in(3)))
                                           : checked(random_dense_or_packed(random));
        for (const char* gpu : kGpus) {
            SCOPED_TRACE(gpu);
            for (const KernelPlan& plan : launches_of(p, *cuda::find_gpu(gpu))) {
                ++num_plans;
                unreached.erase(kernel_of(plan));
            }
        }
    }
    EXPECT_GT(num_plans, 200000u);
    EXPECT_EQ(unreached, std::set<std::string>());
}

// What decides on the bits of a sequence, besides its own length.
std::string bits_of(const KernelPlan& plan) {
    if (const auto* split_kv = std::get_if<cuda::SplitKvPlan>(&plan))
        return "decode " + std::to_string(split_kv->row) + " " +
               std::to_string(split_kv->max_fixed_splits_log2);
    if (const auto* sm90 = std::get_if<cuda::Sm90Plan>(&plan))
        return "sm90 " + std::to_string(sm90->row) + " " + std::to_string(sm90->heads);
    if (const auto* wide = std::get_if<cuda::Sm90WidePlan>(&plan))
        return "wide " + std::to_string(wide->heads);
    const auto& sm80 = std::get<cuda::Sm80Plan>(plan);
    return "sm80 " + std::to_string(sm80.row) + " " + std::to_string(sm80.num_splits);
}

TEST(RandomPlans, BatchInvariantOnesDoNotDependOnTheBatch) {
    std::map<std::string, int> met;
    for (unsigned seed = 0; seed < 3000 && !HasFailure(); ++seed) {
        SCOPED_TRACE(seed);
        Random random(seed);
        PagedAttentionArgs args = random_paged(random, true);
        args.num_splits.reset();
        for (const char* gpu : {"a100", "h200"}) {
            const std::vector<KernelPlan> batch = launches_of(args, gpu);
            if (HasFailure()) return;
            ++met[family_of(batch.front())];
            PagedAttentionArgs alone = args;  // the first sequence, with less room in its table
            alone.page_table.shape[0] = alone.seq_lens.shape[0] = 1;
            alone.page_table.shape[1] = (alone.page_table.shape[1] + 1) / 2;
            if (alone.prefix_lens) alone.prefix_lens->shape[0] = 1;
            if (alone.bidirectional_ranges) alone.bidirectional_ranges->shape[0] = 1;
            const int64_t queries = args.max_seqlen_q.value_or(1);
            alone.q.shape[0] = alone.out.shape[0] = std::min(queries, args.q.shape[0]);
            if (alone.tree_mask) alone.tree_mask->shape[0] = alone.q.shape[0];
            if (alone.cu_seqlens_q) alone.cu_seqlens_q->shape[0] = 2;
            const std::vector<KernelPlan> one = launches_of(alone, gpu);
            ASSERT_EQ(one.size(), 1u);
            for (const KernelPlan& plan : batch) EXPECT_EQ(bits_of(plan), bits_of(one[0])) << gpu;
        }
    }
    EXPECT_GT(met["decode"], 1000);
    EXPECT_GT(met["sm90_attention"], 300);
    EXPECT_GT(met["sm80_attention"], 300);
}

TEST(RandomPlans, AttentionDoesNotDependOnTheBatch) {
    for (unsigned seed = 0; seed < 2000 && !HasFailure(); ++seed) {
        SCOPED_TRACE(seed);
        Random random(seed);
        AttentionArgs args = random_dense_or_packed(random);
        AttentionArgs alone = args;
        const bool is_packed = args.cu_seqlens_q.has_value();
        for (TensorView* array : {&alone.q, &alone.out})
            array->shape[0] = is_packed ? std::min(*args.max_seqlen_q, args.q.shape[0]) : 1;
        if (alone.bidirectional_ranges) alone.bidirectional_ranges->shape[0] = 1;
        for (TensorView* array : {&alone.k, &alone.v}) array->shape[0] = is_packed ? *args.max_seqlen_k : 1;
        if (is_packed) alone.cu_seqlens_q->shape[0] = alone.cu_seqlens_k->shape[0] = 2;
        if (is_packed && args.q.shape[0] < *args.max_seqlen_q) continue;  // the bound is that of the total
        for (const char* gpu : {"a100", "h200"}) {
            const auto batch = launches_of(args, gpu), one = launches_of(alone, gpu);
            ASSERT_EQ(one.size(), 1u);
            EXPECT_EQ(bits_of(batch.at(0)), bits_of(one[0])) << gpu;
        }
    }
}

TEST(RandomPlans, DependOnAddressesByTheirAlignmentAlone) {
    for (unsigned seed = 0; seed < 1000 && !HasFailure(); ++seed) {
        SCOPED_TRACE(seed);
        Random random(seed);
        PagedAttentionArgs args = random_paged(random, random.one_in(3));
        const AttentionPlan plan = plan_of(args);
        for (TensorView* array : {&args.q, &args.out, &args.k_pages, &args.v_pages})
            array->data = static_cast<char*>(array->data) + 16 * random.up_to(1000);
        EXPECT_TRUE(plan_of(args) == plan);
    }
}

TEST(RandomPlans, AreMadeWithoutAllocating) {
    for (unsigned seed = 0; seed < 2000 && !HasFailure(); ++seed) {
        SCOPED_TRACE(seed);
        Random random(seed);
        const AttentionParams p = random.one_in(2) ? checked(random_paged(random, random.one_in(3)))
                                                   : checked(random_dense_or_packed(random));
        for (const char* name : kGpus) {
            const Gpu& gpu = *cuda::find_gpu(name);
            const int64_t before = num_allocations;
            const AttentionPlan plan = cuda::plan_attention(p, gpu);
            EXPECT_EQ(num_allocations, before) << name;
            cuda::explain(p, gpu);
            EXPECT_GT(num_allocations, before) << "nothing is counted";
        }
    }
}

}  // namespace
}  // namespace octavo
