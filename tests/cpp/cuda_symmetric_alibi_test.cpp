// ALiBi by the distance to keys on both sides of a query, on CUDA against the CPU: by the kernels that the
// operators choose, in all their instances.
#include "coded_cache.h"
#include "dense_call.h"
#include "paged_call.h"

#include <octavo/attention.h>
#include <octavo/paged_attention.h>

#include <vector>

namespace octavo {
namespace {

// Windows that reach past a query's position, or none.
template <class Args>
void look_past(Random& random, Args& args) {
    args.causal = false;
    args.attention_chunk = 0;
    args.window_right = random.pick({-1, -1, 1, 40});
}

// Hopper's kernel serves it in instances of their own, and sm80_attention where that cannot.
void expect_kernel(const Explanation& explanation) {
    if (kind_of(explanation) == "sm90_attention") {
        EXPECT_EQ(field(explanation, "feature"), "symmetric_alibi");
    } else {
        EXPECT_EQ(kind_of(explanation), "sm80_attention");
    }
}

class CudaSymmetricAlibiTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(CudaSymmetricAlibiTest, DenseAndPacked) {
    Random random(GetParam());
    const int64_t head_dim = random.pick({16, 64, 64, 80, 96, 128, 128, 192, 256, 512});
    const int64_t value_dim = random.one_in(4) ? random.pick({40, 64, 128, 256}) : head_dim;
    DenseCall call(random, GetParam(), head_dim, value_dim, random.pick({0, 0, 3}));
    look_past(random, call.args);
    call.with_alibi = call.symmetric_alibi = true;
    call.run_on_cpu();
    call.expect_right([](const AttentionArgs& args) {
        ASSERT_TRUE(check_attention(args).alibi_symmetric);
        expect_kernel(explain(args));
        attention(args);
    });
}

// Under a causal mask it is plain ALiBi, bit for bit, unless a prefix reaches past a query.
TEST_P(CudaSymmetricAlibiTest, Causal) {
    Random random(GetParam());
    const int64_t head_dim = random.pick({64, 96, 128, 256});
    DenseCall call(random, GetParam(), head_dim, head_dim, 0);
    call.args.causal = call.with_alibi = call.symmetric_alibi = true;
    call.run_on_cpu();
    call.expect_right(attention);
    if (call.with_prefix) return;
    const std::vector<uint16_t> symmetric = call.out.fetch();
    const std::vector<float> lse = call.lse.fetch();
    call.symmetric_alibi = false;
    call.set(kOnGpu);
    attention(call.args);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_TRUE(call.out.fetch() == symmetric);
    EXPECT_TRUE(call.lse.fetch() == lse);
}

// From a query of each sequence, which the kernels for decoding serve, to many, with splits and without.
TEST_P(CudaSymmetricAlibiTest, Paged) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t head_dim = random.pick({64, 96, 128, 128, 192, 256, 320});
    const int64_t num_kv_heads = random.pick({1, 2, 8}), group_size = random.pick({1, 3, 4});
    const int32_t seqlen_q = random.pick({1, 1, 2, 4, 70});
    const std::vector<int32_t> lengths(random.pick({1, 5, 40}), seqlen_q);
    Cache cache(random, longer(random, lengths), random.pick({1, 16, 24, 256}), num_kv_heads, head_dim,
                dtype);
    PagedCall call(random, cache, seqlen_q, num_kv_heads * group_size, dtype);
    pick_masks(random, call.options);
    look_past(random, call.options);
    if (random.one_in(3)) call.pick_prefix_lens(random);
    call.with_alibi = call.symmetric_alibi = true;
    SCOPED_TRACE(call.name());
    if (seqlen_q > 1) {
        expect_kernel(call.explained());
    } else {
        EXPECT_NE(kind_of(call.explained()), "sm80_attention");
    }
    call.run_on_cpu();
    call.expect_right(paged_attention);
    call.options.batch_invariant = true;
    call.expect_right(paged_attention);
    call.expect_the_same_alone();
}

TEST_P(CudaSymmetricAlibiTest, Codes) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const auto codes = random.pick({cuda::Codes::e4m3, cuda::Codes::int8, cuda::Codes::int4});
    const int64_t head_dim = random.pick({64, 128, 256}), num_kv_heads = random.pick({1, 2});
    const int32_t seqlen_q = random.pick({1, 3, 100});
    const std::vector<int32_t> lengths(random.pick({1, 5}), seqlen_q);
    Cache cache(random, longer(random, lengths), random.pick({1, 16, 256}), num_kv_heads, head_dim, dtype);
    PagedCall call(random, cache, seqlen_q, 4 * num_kv_heads, dtype);
    look_past(random, call.options);
    call.with_alibi = call.symmetric_alibi = true;
    const Layout layout = pick_layout(random);
    const Scales scales = pick_scales(random, codes);
    const CodedCache coded(random, call, codes, layout, scales);
    SCOPED_TRACE(name_of(layout, scales));
    call.run_on_cpu();
    call.expect_right([&](const PagedAttentionArgs& args) { cuda::attention(coded.params(args), nullptr); });
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaSymmetricAlibiTest, ::testing::Range(0u, 48u));

}  // namespace
}  // namespace octavo
