// Prefill over caches of codes on Hopper, against the CPU over the numbers that the codes stand for.
#include "coded_cache.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace octavo {
namespace {

using cuda::Codes;

// A batch of packed queries over codes, with masks, scales and a layout of any kind.
class CudaSm90CodesTest : public ::testing::TestWithParam<std::tuple<Codes, unsigned>> {
  protected:
    // By sm90_attention; with splits, by the instance that shares out keys. one_block: by that for row tiles
    // of one block.
    void expect_right(Random& random, const std::vector<int32_t>& lengths_q,
                      const std::vector<int32_t>& lengths_k, int64_t num_kv_heads, int64_t group_size,
                      bool splits, bool one_block = false) {
        const Codes codes = std::get<0>(GetParam());
        const bool has_int4 = cuda::type_of_values(codes) == DType::int4;
        const DType dtype = random.pick({DType::float16, DType::bfloat16});
        const int64_t head_dim = random.pick({64, 96, 128, 128, has_int4 ? 32 : 80});
        Cache cache(random, lengths_k, random.pick({1, 5, 16, 24, 256}), num_kv_heads, head_dim, dtype);
        PagedCall call(random, cache, lengths_q, num_kv_heads * group_size, dtype);
        pick_masks(random, call.options);
        if (splits && call.options.window_left >= 0) call.options.window_left += 1200;
        if (splits && call.options.attention_chunk > 0) call.options.attention_chunk += 1200;
        call.options.max_seqlen_q = *std::max_element(lengths_q.begin(), lengths_q.end());
        call.with_alibi = !splits && !one_block && random.one_in(4);
        if (random.one_in(4)) call.pick_prefix_lens(random);
        const Layout layout = pick_layout(random);
        const Scales scales = pick_scales(random, codes);
        const CodedCache coded(random, call, codes, layout, scales);
        SCOPED_TRACE(name_of(layout, scales));
        call.run_on_cpu();
        call.expect_right([&](const PagedAttentionArgs& args) {
            const AttentionParams p = coded.params(args);
            if (is_hopper()) {
                std::string why_not;
                const auto plan = cuda::plan_sm90_attention(p, cuda::gpu_of(0), &why_not);
                ASSERT_TRUE(plan) << why_not;
                if (splits) {
                    ASSERT_EQ(field(describe(*plan), "feature"), "splits");
                }
                ASSERT_EQ(field(describe(*plan), "warpgroups"), one_block ? "1" : "2");
                if (one_block) return cuda::run(p, *plan, nullptr);
            }
            cuda::attention(p, nullptr);
        });
    }
    // By sm90_attention over numbers that codes became before, whether that would be chosen or not.
    void expect_right_expanded(Random& random, const std::vector<int32_t>& lengths_q,
                               const std::vector<int32_t>& lengths_k, int64_t num_kv_heads,
                               int64_t group_size, bool splits) {
        const Codes codes = std::get<0>(GetParam());
        const int64_t head_dim = random.pick({64, 96, 128, 128, 256, 192, 32, 160});
        const Scales scales = pick_scales(random, codes);
        const bool is_exact = scales == Scales::of_heads && head_dim <= 128;
        const DType dtype = is_exact ? DType::bfloat16 : random.pick({DType::float16, DType::bfloat16});
        const int64_t page_size = random.pick({1, 5, 16, 24, 256});
        Cache cache(random, lengths_k, page_size, num_kv_heads, head_dim, dtype);
        // Room for some 400 tokens more at most: expanded, that of large batches must not take too much
        // memory.
        if (random.one_in(3)) cache.widen(cache.max_pages + random.pick({1, 1 + 400 / int(page_size)}));
        PagedCall call(random, cache, lengths_q, num_kv_heads * group_size, dtype);
        pick_masks(random, call.options);
        call.options.max_seqlen_q = *std::max_element(lengths_q.begin(), lengths_q.end());
        call.with_alibi = random.one_in(4) && !splits;  // it has no instance with splits
        if (random.one_in(4)) call.pick_prefix_lens(random);
        const Layout layout = pick_layout(random);
        const CodedCache coded(random, call, codes, layout, scales);
        SCOPED_TRACE(name_of(layout, scales));
        call.run_on_cpu();
        call.expect_right([&](const PagedAttentionArgs& args) { run_expanded(coded.params(args)); });
    }
    // As a mixed batch, whether that would be chosen or not: by expand_codes where sequences have at least so
    // many queries, by the kernels that read codes where they have fewer.
    void expect_right_mixed(Random& random, const std::vector<int32_t>& lengths_q,
                            const std::vector<int32_t>& lengths_k, int32_t many_queries) {
        const Codes codes = std::get<0>(GetParam());
        const bool has_int4 = cuda::type_of_values(codes) == DType::int4;
        const int64_t head_dim = random.pick({64, 96, 128, 128, has_int4 ? 32 : 80});
        const Scales scales = pick_scales(random, codes);
        const DType dtype =
            scales == Scales::of_heads ? DType::bfloat16 : random.pick({DType::float16, DType::bfloat16});
        const int64_t num_kv_heads = random.pick({2, 3});
        Cache cache(random, lengths_k, random.pick({1, 5, 16, 24, 256}), num_kv_heads, head_dim, dtype);
        PagedCall call(random, cache, lengths_q, num_kv_heads * random.pick({1, 3, 4, 8, 16}), dtype);
        pick_masks(random, call.options);
        call.options.max_seqlen_q = *std::max_element(lengths_q.begin(), lengths_q.end());
        call.with_alibi = random.one_in(4);
        if (random.one_in(4)) call.pick_prefix_lens(random);
        const Layout layout = pick_layout(random);
        const CodedCache coded(random, call, codes, layout, scales);
        SCOPED_TRACE(name_of(layout, scales));
        auto plan = [&](std::string* why_not) {
            return cuda::make_mixed_plan(coded.params(call.on_gpu()), cuda::gpu_of(0), many_queries, why_not);
        };
        if (is_hopper() && !plan(nullptr)) {
            call.with_alibi = false;  // with it keys are not cut into splits, and SMs may lack work
            std::string why_not;
            if (!plan(&why_not)) GTEST_SKIP() << why_not;
        }
        call.run_on_cpu();
        call.expect_right(
            [&](const PagedAttentionArgs& args) { run_expanded(coded.params(args), many_queries); });
    }
    // On workspace that is full of NaN before.
    static void run_expanded(const AttentionParams& p, int32_t many_queries = 0) {
        if (!is_hopper()) return cuda::attention(p, nullptr);
        std::string why_not;
        const cuda::Gpu& gpu = cuda::gpu_of(0);
        const auto plan = many_queries > 0 ? cuda::make_mixed_plan(p, gpu, many_queries, &why_not)
                                           : cuda::make_expanded_plan(p, gpu, &why_not);
        ASSERT_TRUE(plan) << why_not;
        poison_workspace(plan->workspace_bytes(), cuda::WorkspaceUser::expanded_codes);
        cuda::run(p, *plan, nullptr);
    }
};

TEST_P(CudaSm90CodesTest, MixedBatches) {
    Random random(std::get<1>(GetParam()));
    const std::vector<int32_t> lengths_q = mixed_lengths_q(random);
    const std::vector<int32_t> lengths_k = longer(random, lengths_q);
    expect_right(random, lengths_q, lengths_k, random.pick({2, 3}), random.pick({1, 3, 4, 8}), false);
}

// Row tiles for a part of the SMs, which share out their keys.
TEST_P(CudaSm90CodesTest, Splits) {
    Random random(std::get<1>(GetParam()));
    std::vector<int32_t> lengths_q{random.pick({160, 200})};
    std::vector<int32_t> lengths_k{lengths_q[0] + random.pick({2501, 4000})};
    for (int32_t i = random.pick({0, 1, 3}); i > 0; --i) {
        lengths_q.push_back(random.pick({0, 1, 17, 64, 100, 129}));
        lengths_k.push_back(lengths_q.back() + random.pick({0, 130, 1000, 2501, 4000}));
    }
    expect_right(random, lengths_q, lengths_k, random.pick({2, 3}), random.pick({3, 4, 5, 8}), true);
}

// Drafts: sequences of one block of rows at most, with every number of tiles of keys from none on.
TEST_P(CudaSm90CodesTest, Drafts) {
    Random random(500 + std::get<1>(GetParam()));
    const int64_t group_size = random.pick({1, 3, 4, 8});
    const auto most = static_cast<int32_t>(group_size == 8 ? 8 : 16);
    std::vector<int32_t> lengths_q, lengths_k;
    for (int32_t i = 0; i < 70; ++i) {
        lengths_q.push_back(i == 0 ? most : random.pick({0, 1, 2, 5, 7, 8, most}));
        lengths_k.push_back(lengths_q.back() + random.pick({0, 1, 80, 96, 127, 191, 192, 300, 700}));
    }
    std::reverse(lengths_q.begin(), lengths_q.end());
    std::reverse(lengths_k.begin(), lengths_k.end());
    expect_right(random, lengths_q, lengths_k, random.pick({2, 3}), group_size, false, true);
}

// The same for a part of the SMs, which share out their keys.
TEST_P(CudaSm90CodesTest, SplitDrafts) {
    Random random(600 + std::get<1>(GetParam()));
    std::vector<int32_t> lengths_q{8}, lengths_k{8 + random.pick({2501, 4000})};
    for (int32_t i = random.pick({2, 3, 5}); i > 0; --i) {
        lengths_q.push_back(random.pick({0, 1, 5, 8}));
        lengths_k.push_back(lengths_q.back() + random.pick({0, 130, 1000, 2501, 4000}));
    }
    expect_right(random, lengths_q, lengths_k, random.pick({2, 3}), random.pick({3, 4, 8}), true, true);
}

TEST_P(CudaSm90CodesTest, ExpandedBatches) {
    Random random(100 + std::get<1>(GetParam()));
    std::vector<int32_t> lengths_q = mixed_lengths_q(random);
    if (random.one_in(2)) lengths_q = {300, 0, 64, 200, 1};
    const std::vector<int32_t> lengths_k = longer(random, lengths_q);
    expect_right_expanded(random, lengths_q, lengths_k, random.pick({2, 3}), random.pick({1, 3, 4, 8}),
                          false);
}

// Row tiles for a part of the SMs.
TEST_P(CudaSm90CodesTest, ExpandedSplits) {
    Random random(100 + std::get<1>(GetParam()));
    const std::vector<int32_t> lengths_q{random.pick({160, 200}), random.pick({0, 64})};
    std::vector<int32_t> lengths_k{lengths_q[0] + random.pick({2501, 4000}), lengths_q[1]};
    expect_right_expanded(random, lengths_q, lengths_k, random.pick({2, 3}), random.pick({4, 5, 8}), true);
}

TEST_P(CudaSm90CodesTest, MixedPlans) {
    Random random(300 + std::get<1>(GetParam()));
    const std::vector<int32_t> lengths_q = mixed_lengths_q(random);
    expect_right_mixed(random, lengths_q, longer(random, lengths_q), random.pick({17, 64, 129, 230}));
}

// Sequences of which none, or each, has many queries, or few.
TEST_P(CudaSm90CodesTest, MixedPlansOfOnePart) {
    Random random(400 + std::get<1>(GetParam()));
    const std::vector<int32_t> lengths_q(random.pick({60, 33}), random.pick({1, 2, 24, 70}));
    const int32_t many_queries = std::max<int32_t>(random.pick({2, 20, 65}), 17);
    std::vector<int32_t> others = lengths_q;
    others.push_back(many_queries);  // so that there is a place in the workspace
    expect_right_mixed(random, others, longer(random, others), many_queries);
}

// A captured call reads lengths when it is replayed: shorter ones behind longer ones, and the other way.
TEST_P(CudaSm90CodesTest, ReplaysOfExpandedCodes) {
    if (!is_hopper()) return;
    Random random(200 + std::get<1>(GetParam()));
    const Codes codes = std::get<0>(GetParam());
    const int64_t head_dim = random.pick({64, 128, 256});
    const std::vector<int32_t> lengths_q{200, 64, 130}, longest{1000, 700, 333}, shortest{200, 65, 291};
    Cache cache(random, longest, 16, 2, head_dim, DType::bfloat16);
    PagedCall call(random, cache, lengths_q, 8, DType::bfloat16);
    call.options.max_seqlen_q = 200;
    if (random.one_in(2)) call.options.window_left = 150;
    const CodedCache coded(random, call, codes, pick_layout(random), pick_scales(random, codes));
    const AttentionParams p = coded.params(call.on_gpu());
    std::string why_not;
    const auto plan = cuda::make_expanded_plan(p, cuda::gpu_of(0), &why_not);
    ASSERT_TRUE(plan) << why_not;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    cuda::run(p, *plan, stream);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (const std::vector<int32_t>& lengths : {shortest, longest, shortest}) {
        call.lengths.set(lengths);
        call.poison_outputs();
        ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        call.expect_what_the_cpu_gives();
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
}

// Of bfloat16, since the conversion of padding's queries takes time in which a warpgroup without rows could
// get ahead.
TEST(CudaSm90CodesFewRows, BehindRowTilesWithoutKeys) {
    const FewRowsBehindPadding batch(num_sms());
    for (const int64_t head_dim : {64, 128}) {
        for (const Codes codes : {Codes::e4m3, Codes::int8_int4}) {
            SCOPED_TRACE(kCodesNames[static_cast<int>(codes)] + (" " + std::to_string(head_dim)));
            Random random(head_dim);
            Cache cache(random, batch.lengths_k, 16, batch.kKvHeads, head_dim, DType::bfloat16);
            PagedCall call(random, cache, batch.lengths_q, batch.kGroupSize * batch.kKvHeads,
                           DType::bfloat16);
            call.options.max_seqlen_q = 17;  // one block of rows would have an instance of its own
            const CodedCache coded(random, call, codes, Layout::token_major, pick_scales(random, codes));
            call.run_on_cpu();
            call.expect_right([&](const PagedAttentionArgs& args) {
                const AttentionParams p = coded.params(args);
                if (!is_hopper()) return cuda::attention(p, nullptr);
                std::string why_not;
                const auto plan = cuda::plan_sm90_attention(p, cuda::gpu_of(0), &why_not);
                ASSERT_TRUE(plan) << why_not;
                ASSERT_EQ(field(describe(*plan), "feature"), "few_rows");
                cuda::run(p, *plan, nullptr);
            });
        }
    }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Codes, unsigned>>& info) {
    return kCodesNames[static_cast<int>(std::get<0>(info.param))] +
           ("_" + std::to_string(std::get<1>(info.param)));
}

INSTANTIATE_TEST_SUITE_P(Codes, CudaSm90CodesTest,
                         ::testing::Combine(::testing::ValuesIn(cuda::kAllCodes), ::testing::Range(0u, 12u)),
                         name_of);

}  // namespace
}  // namespace octavo
