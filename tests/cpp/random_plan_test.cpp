// What holds for the plans of all problems, on thousands of random ones.
#include "cuda/backend.h"
#include "sound_plans.h"

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
        const int64_t rows = params.total_q * params.num_q_heads;
        EXPECT_EQ(shared->out_bytes, (shared->num_runs + shared->overlaps) * rows * params.head_dim_v * 2);
        EXPECT_EQ(shared->lse_bytes, (shared->num_runs + 1) * rows * 4);
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
            if (tiles.ctas > 1) continue;
            plan.gathers = true;
            plan.feature = cuda::has_few_rows(tiles.warpgroups, tiles.ctas) ? cuda::Sm90Feature::few_rows
                                                                            : cuda::Sm90Feature::sinks;
            add(plan, dtype, row);
            for (auto feature : {cuda::Sm90Feature::splits, cuda::Sm90Feature::tree}) {
                const bool is_compiled =
                    feature == cuda::Sm90Feature::tree
                        ? cuda::is_first_row(tiles.head_dim, tiles.value_dim, tiles.warpgroups, tiles.ctas)
                        : cuda::has_splits(tiles.head_dim, tiles.value_dim, tiles.ctas);
                if (!is_compiled) continue;
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
