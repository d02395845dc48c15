// Head dims above 448 on Hopper: sm90_wide_attention against the CPU.
#include "cuda/backend.h"
#include "dense_call.h"
#include "explain_testing.h"
#include "paged_call.h"

#include <octavo/explain.h>

namespace octavo {
namespace {

void expect_wide(const Explanation& text) {
    if (is_hopper()) {
        EXPECT_EQ(kind_of(text), "sm90_wide_attention") << text.to_string();
    }
}

class CudaWideTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(CudaWideTest, DenseAndPackedAgreeWithTheCpu) {
    Random random(GetParam());
    const int64_t head_dim = random.pick({512, 512, 512, 456, 504});
    DenseCall call(random, GetParam(), head_dim, head_dim, random.pick({0, 0, 8}));
    call.args.dropout_p = 0.0;
    call.with_alibi = call.with_blocks = false;
    if (call.args.softmax_scale) call.args.softmax_scale = 0.3;
    call.run_on_cpu();
    call.expect_right([](const AttentionArgs& args) {
        expect_wide(explain(args, ""));
        attention(args);
    });
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaWideTest, ::testing::Range(0u, 48u));

class CudaWidePagedTest : public ::testing::TestWithParam<unsigned> {
  protected:
    CudaWidePagedTest() {
        pick_masks(random_, call_.options);
        call_.options.max_seqlen_q = random_.pick({333, 400});
        if (random_.one_in(4)) call_.pick_prefix_lens(random_);
    }

    Random random_{GetParam()};
    const DType dtype_ = random_.pick({DType::float16, DType::bfloat16});
    const int64_t num_kv_heads_ = random_.pick({2, 3});
    const int64_t group_size_ = random_.pick({3, 4, 8});
    const std::vector<int32_t> lengths_q_{130, 1, 0, 333, 64, 200, 17, 257};
    const std::vector<int32_t> lengths_k_ = longer(random_, lengths_q_);
    Cache cache_{random_, lengths_k_, random_.pick({8, 16, 24, 64, 256}), num_kv_heads_, 512, dtype_};
    PagedCall call_{random_, cache_, lengths_q_, num_kv_heads_ * group_size_, dtype_};
};

TEST_P(CudaWidePagedTest, AgreesWithTheCpu) {
    expect_wide(call_.explained());
    call_.run_on_cpu();
    call_.expect_right(paged_attention);
}

TEST_P(CudaWidePagedTest, BatchInvariant) {
    call_.options.batch_invariant = true;
    expect_wide(call_.explained());
    call_.expect_the_same_alone();
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaWidePagedTest, ::testing::Range(0u, 16u));

// More row tiles than pairs of SMs, so that each pair goes from one to the next.
TEST(CudaWide, ManyRowTiles) {
    constexpr int64_t kBatch = 3, kLength = 1100, kHeads = 8, kKvHeads = 2, kHeadDim = 512;
    for (const bool causal : {true, false}) {
        Random random(causal);
        const DType dtype = DType::bfloat16;
        Mirror<uint16_t> q(random.normal(kBatch * kLength * kHeads * kHeadDim, dtype));
        Mirror<uint16_t> k(random.normal(kBatch * kLength * kKvHeads * kHeadDim, dtype));
        Mirror<uint16_t> v(random.normal(kBatch * kLength * kKvHeads * kHeadDim, dtype));
        Mirror<uint16_t> out(nans(q.host.size(), dtype));
        for (const bool on_gpu : {false, true}) {
            auto view = [&](Mirror<uint16_t>& x, int64_t heads) {
                return on_gpu ? x.on_gpu(dtype, {kBatch, kLength, heads, kHeadDim})
                              : x.on_host(dtype, {kBatch, kLength, heads, kHeadDim});
            };
            AttentionArgs args;
            args.causal = causal;
            args.q = view(q, kHeads);
            args.k = view(k, kKvHeads);
            args.v = view(v, kKvHeads);
            args.out = view(out, kHeads);
            if (on_gpu) expect_wide(explain(args, ""));
            attention(args);
        }
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        expect_close(out.fetch(), out.host, dtype);
    }
}

}  // namespace
}  // namespace octavo
