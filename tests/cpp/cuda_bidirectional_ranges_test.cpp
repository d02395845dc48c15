// Ranges of keys that see each other in both directions, on CUDA against the CPU: by the kernels that the
// operators choose, in all their instances.
#include "coded_cache.h"
#include "cuda/attention/run.h"
#include "dense_call.h"
#include "paged_call.h"

#include <octavo/attention.h>
#include <octavo/paged_attention.h>

#include <algorithm>
#include <optional>
#include <string>
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

// Some ranges of each sequence, or more than a warp looks at at once.
template <class Call>
void pick_ranges(Random& random, Call& call, const std::vector<int32_t>& lengths) {
    call.ranges.emplace(random_ranges(random, lengths, random.pick({kNumRanges, kNumRanges, 70})));
}

// Makes NaN of the keys and values that no query sees.
void poison_unseen_keys(DenseCall& call) {
    call.set(kOnHost);
    const AttentionParams p = check_attention(call.args);
    for (int32_t b = 0, first = 0; b < p.batch; first += call.lengths_k[b++]) {
        const RangedSlice slice = RangedSlice::make(p, b);
        for (int32_t key = 0; key < call.lengths_k[b]; ++key) {
            bool seen = false;
            for (int32_t i = 0; i < slice.seqlen_q; ++i)
                seen = seen || slice.see.visible(slice.q_pos(i), key);
            if (seen) continue;
            auto poison = [&](Mirror<uint16_t>& rows, int64_t row) {
                const std::vector<uint16_t> unseen = nans(call.num_kv_heads * row, call.dtype);
                std::copy(unseen.begin(), unseen.end(), rows.host.begin() + (first + key) * unseen.size());
            };
            poison(call.k, call.row);
            poison(call.v, call.value_row);
        }
    }
    call.k.upload(call.k.host);
    call.v.upload(call.v.host);
}

std::optional<cuda::Sm80Plan> plan_sm80(const AttentionParams& params, const cuda::Gpu& gpu, std::string*) {
    return cuda::plan_sm80_attention(params, gpu);
}

// Whether an instance for ranges serves.
bool is_for_ranges(const Explanation& text) {
    const std::string feature = field(text, "feature");
    return feature == "ranges" || feature == "split_ranges";
}

class CudaBidirectionalRangesTest : public ::testing::TestWithParam<unsigned> {};

// What Hopper's kernel serves, there by its instances for ranges.
TEST_P(CudaBidirectionalRangesTest, DenseAndPackedOnHopper) {
    Random random(GetParam());
    const int64_t head_dim = random.pick({64, 72, 96, 128, 192, 256, 256});
    DenseCall call(random, GetParam(), head_dim, head_dim, random.pick({0, 8}));
    hide_some(random, call.args);
    call.with_blocks = call.with_alibi = false;
    call.args.dropout_p = 0.0;
    call.args.softmax_scale.reset();
    pick_ranges(random, call, call.lengths_k);
    poison_unseen_keys(call);
    call.run_on_cpu();
    call.expect_right([](const AttentionArgs& args) {
        const AttentionParams p = check_attention(args);
        ASSERT_TRUE(p.ranges);
        const Explanation explained = explain(args);
        const bool is_hopper = cuda::gpu_of(0).has_sm90_kernels;
        EXPECT_EQ(kind_of(explained), is_hopper ? "sm90_attention" : "sm80_attention");
        EXPECT_TRUE(is_for_ranges(explained));
        attention(args);
    });
    call.expect_right([](const AttentionArgs& args) {
        const AttentionParams p = check_attention(args);
        cuda::run(p, cuda::plan_sm80_attention(p, cuda::gpu_of(0)), nullptr);
    });
}

TEST_P(CudaBidirectionalRangesTest, DenseAndPacked) {
    Random random(GetParam());
    const int64_t head_dim = random.pick({16, 64, 64, 80, 96, 128, 128, 192, 256, 512});
    const int64_t value_dim = random.one_in(4) ? random.pick({40, 64, 128, 256}) : head_dim;
    DenseCall call(random, GetParam(), head_dim, value_dim, random.pick({0, 0, 3}));
    hide_some(random, call.args);
    call.with_blocks = false;
    call.symmetric_alibi = random.one_in(2);
    pick_ranges(random, call, call.lengths_k);
    call.run_on_cpu();
    call.expect_right([](const AttentionArgs& args) {
        ASSERT_TRUE(check_attention(args).ranges);
        EXPECT_TRUE(is_for_ranges(explain(args)));
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
    pick_ranges(random, call, cache.lengths);
    const bool hides_earlier = call.options.window_left >= 0 || call.options.attention_chunk > 0;
    if (seqlen_q > 1 || (hides_earlier && !call.options.ranges_keep_window_left)) {
        EXPECT_TRUE(is_for_ranges(call.explained())) << call.name();
    } else {
        EXPECT_NE(kind_of(call.explained()), "sm80_attention") << call.name();
    }
    call.run_on_cpu();
    call.expect_right(paged_attention);
    call.options.batch_invariant = true;
    call.expect_right(paged_attention);
}

// Chunks of prompts beside single tokens, whose keys may be shared out.
TEST_P(CudaBidirectionalRangesTest, PagedOnHopper) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t head_dim = random.pick({64, 96, 128, 192, 256, 256}),
                  group_size = random.pick({1, 2, 4, 5});
    std::vector<int32_t> lengths_q{random.pick({70, 300, 513})};
    for (int32_t b = random.pick({0, 0, 2, 12}); b > 0; --b)
        lengths_q.push_back(random.pick({1, 1, 0, 17, 64, 130}));
    std::vector<int32_t> lengths_k = longer(random, lengths_q);
    if (random.one_in(2)) lengths_k[0] += 3000;
    Cache cache(random, lengths_k, random.pick({8, 16, 24, 256}), 8, head_dim, dtype);
    PagedCall call(random, cache, lengths_q, 8 * group_size, dtype);
    call.options.max_seqlen_q = *std::max_element(lengths_q.begin(), lengths_q.end());
    hide_some(random, call.options);
    call.options.softcap = random.pick({0.0, 0.0, 20.0});
    if (random.one_in(3)) call.pick_prefix_lens(random);
    pick_ranges(random, call, cache.lengths);
    const bool is_hopper = cuda::gpu_of(0).has_sm90_kernels;
    EXPECT_EQ(kind_of(call.explained()), is_hopper ? "sm90_attention" : "sm80_attention") << call.name();
    EXPECT_TRUE(is_for_ranges(call.explained())) << call.name();
    call.run_on_cpu();
    call.expect_right(paged_attention);
    call.expect_right([](const PagedAttentionArgs& args) { run_by(plan_sm80, args); });
    call.options.batch_invariant = true;
    call.expect_right(paged_attention);
    call.expect_the_same_alone();
}

TEST_P(CudaBidirectionalRangesTest, Codes) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const auto codes = random.pick({cuda::Codes::e4m3, cuda::Codes::int8, cuda::Codes::int4});
    const int64_t head_dim = random.pick({64, 128, 256}), num_kv_heads = random.pick({1, 2});
    const int32_t seqlen_q = random.pick({1, 3, 100, 200});
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
