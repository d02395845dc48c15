// Values with a head dim of their own: the kernel that is chosen, and in pages every other one, against the
// CPU.
#include "coded_cache.h"
#include "cuda/backend.h"
#include "dense_call.h"
#include "explain_testing.h"
#include "paged_call.h"

#include <octavo/explain.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

namespace octavo {
namespace {

using Dims = std::pair<int64_t, int64_t>;  // of keys and of values

class CudaValueDimTest : public ::testing::TestWithParam<unsigned> {};

// By Hopper's kernel, too, which serves dims that are equally many blocks of 64 columns, and 192 with 128.
TEST_P(CudaValueDimTest, AgreesWithTheCpu) {
    Random random(GetParam());
    const auto [head_dim, value_dim] = random.pick<Dims>(
        {{192, 128}, {192, 128}, {192, 128}, {160, 72}, {136, 128}, {128, 120}, {72, 128}, {240, 200}});
    DenseCall call(random, GetParam(), head_dim, value_dim, random.pick({0, 0, 8}));
    // No instance has these together; the other kernel is tested with all of them.
    if (call.args.dropout_p > 0.0) call.with_alibi = false;
    if (call.with_blocks && (head_dim > 128 || call.args.dropout_p > 0.0 || call.with_alibi))
        call.with_blocks = false;
    if (call.args.softmax_scale && *call.args.softmax_scale <= 0.0) call.args.softmax_scale = 0.3;
    call.run_on_cpu();
    call.expect_right([](const AttentionArgs& args) {
        if (is_hopper()) {
            const Explanation text = explain(args, "");
            EXPECT_EQ(kind_of(text), "sm90_attention") << text.to_string();
        }
        attention(args);
    });
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaValueDimTest, ::testing::Range(0u, 64u));

// Packed sequences of few queries among others of many, which warps share out another way; and pairs of CTAs.
TEST(CudaValueDim, FewRowsAndPairs) {
    for (const bool few : {true, false}) {
        constexpr int64_t kHeads = 4, kHeadDim = 192, kValueDim = 128;
        Random random(few);
        const DType dtype = DType::bfloat16;
        std::vector<int32_t> lengths_q(24, few ? 1 : 1024), lengths_k(24, few ? 400 : 1024);
        if (few) lengths_q[3] = lengths_q[17] = 200, lengths_q[5] = 7, lengths_q[9] = 0;
        if (!few) lengths_q.resize(2), lengths_k.resize(2);
        const int64_t batch = static_cast<int64_t>(lengths_q.size());
        Mirror<int32_t> cu_q(cumulative(lengths_q)), cu_k(cumulative(lengths_k));
        const int64_t total_q = cu_q.host.back(), total_k = cu_k.host.back();
        Mirror<uint16_t> q(random.normal(total_q * kHeads * kHeadDim, dtype));
        Mirror<uint16_t> k(random.normal(total_k * kHeads * kHeadDim, dtype));
        Mirror<uint16_t> v(random.normal(total_k * kHeads * kValueDim, dtype));
        Mirror<uint16_t> out(nans(total_q * kHeads * kValueDim, dtype));
        auto run = [&](auto on) {
            AttentionArgs args;
            args.causal = true;
            auto tokens = [&](auto& x, int64_t total, int64_t dim) {
                return few ? on(x, dtype, {total, kHeads, dim})
                           : on(x, dtype, {batch, total / batch, kHeads, dim});
            };
            args.q = tokens(q, total_q, kHeadDim);
            args.k = tokens(k, total_k, kHeadDim);
            args.v = tokens(v, total_k, kValueDim);
            args.out = tokens(out, total_q, kValueDim);
            if (few) {
                args.cu_seqlens_q = on(cu_q, DType::int32, {batch + 1});
                args.cu_seqlens_k = on(cu_k, DType::int32, {batch + 1});
                args.max_seqlen_q = 200;
                args.max_seqlen_k = 400;
            }
            if (args.q.device == kGpu && is_hopper()) {
                const Explanation text = explain(args, "");
                EXPECT_EQ(field(text, "head_dim_v"), "128") << text.to_string();
                EXPECT_EQ(field(text, few ? "feature" : "cluster"), few ? "few_rows" : "2")
                    << text.to_string();
            }
            attention(args);
        };
        run(kOnHost);
        run(kOnGpu);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        expect_close(out.fetch(), out.host, dtype);
    }
}

// In pages: values narrower and wider than keys, in every instance of the decode kernels.
constexpr Dims kPagedDims[] = {{192, 128}, {128, 64}, {64, 128}, {72, 40},  {8, 64},   {96, 80},
                               {80, 96},   {8, 256},  {192, 8},  {256, 72}, {512, 64}, {64, 512}};

class CudaPagedValueDimTest : public ::testing::TestWithParam<unsigned> {
  protected:
    unsigned seed() const { return GetParam(); }
    Dims dims() const { return kPagedDims[seed() % std::size(kPagedDims)]; }
    static int64_t most_rows(Dims dims) { return std::max(dims.first, dims.second) > 128 ? 8 : 16; }

    static std::vector<int32_t> pick_lengths(Random& random, int64_t num_kv_heads) {
        std::vector<int32_t> lengths;
        for (int32_t b = random.pick({1, 1, 3, 40}); b > 0; --b)
            lengths.push_back(random.pick({0, 1, 15, 16, 17, 300, 1024, 2100}) + random.pick({0, 0, 5}));
        if (random.one_in(3)) lengths[0] = is_small_scale() ? 900 : 9000;
        return scaled_batch(lengths, num_kv_heads, 900);
    }
};

TEST_P(CudaPagedValueDimTest, DecodeKernels) {
    Random random(seed());
    const auto [head_dim, value_dim] = dims();
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t group_size = random.pick({int64_t{1}, int64_t{3}, int64_t{4}, most_rows(dims())});
    const int64_t num_kv_heads = scaled_heads(random.pick({1, 2, 8}));
    Cache cache(random, pick_lengths(random, num_kv_heads), random.pick({1, 16, 16, 24, 256}), num_kv_heads,
                head_dim, dtype, value_dim);
    PagedCall call(random, cache, 1, num_kv_heads * group_size, dtype);
    pick_masks(random, call.options);
    call.options.v_scale = random.pick({1.0f, 0.5f});
    call.with_alibi = random.one_in(4);
    if (random.one_in(4)) call.pick_prefix_lens(random);
    expect_every_decode_right(call);
    if (HasFatalFailure()) return;
    call.options.batch_invariant = true;
    call.expect_the_same_alone(std::max<int64_t>(call.batch / 3, 1));
}

TEST_P(CudaPagedValueDimTest, ChosenPages) {
    Random random(seed());
    const auto [head_dim, value_dim] = dims();
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t group_size = random.pick({int64_t{1}, int64_t{4}, most_rows(dims())});
    const int64_t num_kv_heads = scaled_heads(random.pick({1, 2, 8}));
    Cache cache(random, pick_lengths(random, num_kv_heads), random.pick({1, 7, 16, 64}), num_kv_heads,
                head_dim, dtype, value_dim);
    PagedCall call(random, cache, 1, num_kv_heads * group_size, dtype);
    call.pick_chosen_pages(random);
    EXPECT_EQ(kind_of(call.explained()), "split_kv_decode") << call.name();
    call.run_on_cpu();
    call.expect_right(paged_attention);
}

// Chunks of prompts beside single queries and drafts, some of them in trees.
TEST_P(CudaPagedValueDimTest, ManyRows) {
    Random random(seed());
    const auto [head_dim, value_dim] = dims();
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t group_size = random.pick({1, 3, 4}), num_kv_heads = random.pick({1, 2, 8});
    const std::vector<int32_t> lengths_q = mixed_lengths_q(random);
    Cache cache(random, longer(random, lengths_q), random.pick({8, 16, 64, 17}), num_kv_heads, head_dim,
                dtype, value_dim);
    PagedCall call(random, cache, lengths_q, num_kv_heads * group_size, dtype);
    call.options.max_seqlen_q = *std::max_element(lengths_q.begin(), lengths_q.end());
    pick_masks(random, call.options);
    call.with_alibi = random.one_in(4);
    if (random.one_in(4)) call.pick_prefix_lens(random);
    if (call.options.causal && random.one_in(3)) call.pick_tree_mask(random);
    if (is_hopper() && call.page_size() % 8 == 0 && dims() == Dims{192, 128}) {
        const Explanation text = call.explained();
        EXPECT_EQ(kind_of(text), call.tree_words ? "sm80_attention" : "sm90_attention") << text.to_string();
    }
    call.run_on_cpu();
    call.expect_right(paged_attention);
    if (HasFatalFailure()) return;
    auto by_sm80 = [](const AttentionParams& p, const cuda::Gpu& gpu, std::string*) {
        return std::optional(cuda::plan_sm80_attention(p, gpu));
    };
    call.expect_right([&](const PagedAttentionArgs& args) { run_by(by_sm80, args); });
}

TEST_P(CudaPagedValueDimTest, BehindASharedPrefix) {
    Random random(seed());
    const auto [head_dim, value_dim] = dims();
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t group_size = random.pick({1, 4, 8}), num_kv_heads = scaled_heads(random.pick({1, 2, 8}));
    const int32_t prefix = random.pick({128, 512});
    std::vector<int32_t> own;
    for (int32_t b = random.pick({2, 9, 40}); b > 0; --b) own.push_back(random.pick({-1, 1, 16, 90, 300}));
    Cache cache =
        Cache::with_shared_prefix(random, prefix, own, 16, num_kv_heads, head_dim, dtype, value_dim);
    PagedCall call(random, cache, std::vector<int32_t>(own.size(), 1), num_kv_heads * group_size, dtype);
    call.packed = false;
    call.options.shared_prefix_len = prefix;
    call.with_lse = !random.one_in(3);
    call.run_on_cpu();
    call.expect_right([](const PagedAttentionArgs& args) {
        const AttentionParams params = check_paged_attention(args);
        cuda::run(params, cuda::make_shared_prefix_plan(params, cuda::gpu_of(0)), nullptr);
    });
}

// Over codes: the decode kernels, and sm80_attention, which serves prompts.
TEST_P(CudaPagedValueDimTest, Codes) {
    Random random(seed());
    const auto [head_dim, value_dim] =
        random.pick<Dims>({{128, 64}, {64, 128}, {192, 128}, {256, 64}, {96, 32}, {32, 256}});
    const auto codes = cuda::kAllCodes[seed() % std::size(cuda::kAllCodes)];
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t group_size = random.pick({int64_t{1}, int64_t{4}, most_rows({head_dim, value_dim})});
    const int64_t num_kv_heads = scaled_heads(random.pick({1, 2, 8}));
    const bool is_decode = !random.one_in(3);
    Cache cache(random, at_least(pick_lengths(random, num_kv_heads), 90), random.pick({1, 16, 24, 64}),
                num_kv_heads, head_dim, dtype, value_dim);
    PagedCall call(random, cache, is_decode ? 1 : 90, num_kv_heads * group_size, dtype);
    if (random.one_in(3)) call.options.window_left = random.pick({0, 10, 90, 300});
    call.with_alibi = random.one_in(3);
    const Layout layout = pick_layout(random);
    const Scales scales = pick_scales(random, codes);
    const CodedCache coded(random, call, codes, layout, scales);
    SCOPED_TRACE(name_of(layout, scales));
    call.run_on_cpu();
    call.expect_right([&](const PagedAttentionArgs& args) {
        const AttentionParams p = coded.params(args);
        const bool is_served =
            cuda::plan_split_kv(p, cuda::gpu_of(0)) || cuda::plan_stream_k(p, cuda::gpu_of(0));
        ASSERT_EQ(is_served, is_decode);
        ASSERT_FALSE(cuda::plan_sm90_attention(p, cuda::gpu_of(0)));
        ASSERT_FALSE(cuda::plan_expanded_attention(p, cuda::gpu_of(0)));
        cuda::attention(p, nullptr);
    });
    if (HasFatalFailure()) return;
    call.expect_right([&](const PagedAttentionArgs& args) {
        const AttentionParams p = coded.params(args);
        cuda::run(p, cuda::plan_sm80_attention(p, cuda::gpu_of(0)), nullptr);
    });
    if (HasFatalFailure() || !is_decode) return;
    call.expect_right([&](const PagedAttentionArgs& args) {
        const AttentionParams p = coded.params(args);
        std::string why_not;
        const auto plan = cuda::plan_stream_k(p, cuda::gpu_of(0), &why_not);
        ASSERT_TRUE(plan) << why_not;
        cuda::run(p, *plan, nullptr);
    });
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaPagedValueDimTest, ::testing::Range(0u, 48u));

}  // namespace
}  // namespace octavo
