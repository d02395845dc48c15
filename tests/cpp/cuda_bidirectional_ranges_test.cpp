// Ranges of keys that see each other in both directions, on CUDA against the CPU: by the kernels that the
// operators choose, in all their instances.
#include "coded_cache.h"
#include "dense_call.h"
#include "paged_call.h"

#include <octavo/attention.h>
#include <octavo/paged_attention.h>

#include <vector>

namespace octavo {
namespace {

// Windows that hide some of a range, from one side at least, so that ranges show something.
template <class Args>
void hide_some(Random& random, Args& args) {
    args.causal = !random.one_in(4);
    args.window_right = random.pick({0, 1, 40});
    args.window_left = random.pick({-1, 0, 9, 100});
    args.attention_chunk = args.causal && random.one_in(4) ? random.pick({30, 64, 200}) : 0;
    args.ranges_keep_window_left = random.one_in(2);
}

class CudaBidirectionalRangesTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(CudaBidirectionalRangesTest, DenseAndPacked) {
    Random random(GetParam());
    const int64_t head_dim = random.pick({16, 64, 64, 80, 96, 128, 128, 192, 256, 512});
    const int64_t value_dim = random.one_in(4) ? random.pick({40, 64, 128, 256}) : head_dim;
    DenseCall call(random, GetParam(), head_dim, value_dim, random.pick({0, 0, 3}));
    hide_some(random, call.args);
    call.with_blocks = false;
    call.symmetric_alibi = random.one_in(2);
    call.ranges.emplace(random_ranges(random, call.lengths_k));
    call.run_on_cpu();
    call.expect_right([](const AttentionArgs& args) {
        ASSERT_TRUE(check_attention(args).ranges);
        const Explanation explained = explain(args);
        EXPECT_EQ(kind_of(explained), "sm80_attention");
        EXPECT_EQ(field(explained, "feature"), "ranges");
        attention(args);
    });
}

// From a query of each sequence to many, with splits and without.
TEST_P(CudaBidirectionalRangesTest, Paged) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t head_dim = random.pick({64, 96, 128, 128, 192, 256, 320});
    const int64_t num_kv_heads = random.pick({1, 2, 8}), group_size = random.pick({1, 3, 4});
    const int32_t seqlen_q = random.pick({1, 1, 2, 4, 70, 300});
    const std::vector<int32_t> lengths(random.pick({1, 5, 40}), seqlen_q);
    Cache cache(random, longer(random, lengths), random.pick({1, 16, 24, 256}), num_kv_heads, head_dim,
                dtype);
    PagedCall call(random, cache, seqlen_q, num_kv_heads * group_size, dtype);
    hide_some(random, call.options);
    if (random.one_in(3)) call.pick_prefix_lens(random);
    call.with_alibi = random.one_in(3);
    call.ranges.emplace(random_ranges(random, cache.lengths));
    const bool hides_earlier = call.options.window_left >= 0 || call.options.attention_chunk > 0;
    if (seqlen_q > 1 || (hides_earlier && !call.options.ranges_keep_window_left)) {
        EXPECT_EQ(kind_of(call.explained()), "sm80_attention") << call.name();
    } else {
        EXPECT_NE(kind_of(call.explained()), "sm80_attention") << call.name();
    }
    call.run_on_cpu();
    call.expect_right(paged_attention);
    call.options.batch_invariant = true;
    call.expect_right(paged_attention);
}

TEST_P(CudaBidirectionalRangesTest, Codes) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const auto codes = random.pick({cuda::Codes::e4m3, cuda::Codes::int8, cuda::Codes::int4});
    const int64_t head_dim = random.pick({64, 128, 256}), num_kv_heads = random.pick({1, 2});
    const int32_t seqlen_q = random.pick({1, 3, 100});
    const std::vector<int32_t> lengths(random.pick({1, 5}), seqlen_q);
    Cache cache(random, longer(random, lengths), random.pick({1, 16, 256}), num_kv_heads, head_dim, dtype);
    PagedCall call(random, cache, seqlen_q, 4 * num_kv_heads, dtype);
    hide_some(random, call.options);
    call.ranges.emplace(random_ranges(random, cache.lengths));
    const Layout layout = pick_layout(random);
    const Scales scales = pick_scales(random, codes);
    const CodedCache coded(random, call, codes, layout, scales);
    SCOPED_TRACE(name_of(layout, scales));
    call.run_on_cpu();
    call.expect_right([&](const PagedAttentionArgs& args) { cuda::attention(coded.params(args), nullptr); });
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaBidirectionalRangesTest, ::testing::Range(0u, 48u));

}  // namespace
}  // namespace octavo
