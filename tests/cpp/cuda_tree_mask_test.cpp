// Tree masks on CUDA against the CPU: random trees by every kernel that serves them, beside sequences that
// have none.
#include "coded_cache.h"
#include "paged_call.h"

#include <octavo/paged_attention.h>

#include <algorithm>
#include <string>
#include <vector>

namespace octavo {
namespace {

// Causal, and else as it comes.
void pick_options(Random& random, PagedCall& call) {
    pick_masks(random, call.options);
    call.options.causal = true;
    if (random.one_in(3)) call.pick_prefix_lens(random);
    call.pick_tree_mask(random);
    call.with_lse = !random.one_in(4);
}

// Where every query's word has the bits of the queries before it, or all bits, nothing is hidden.
void expect_chains_to_be_causal(PagedCall& call) {
    SCOPED_TRACE(call.name());
    std::vector<int32_t> chains, all;
    for (int64_t b = 0; b < call.batch; ++b) {
        for (int32_t i = 0; i < call.num_queries(b); ++i) {
            const uint64_t word = i < 63 ? (uint64_t{2} << i) - 1 : ~uint64_t{0};
            chains.push_back(static_cast<int32_t>(word));
            chains.push_back(static_cast<int32_t>(word >> 32));
            all.insert(all.end(), 2, -1);
        }
    }
    call.tree_words.emplace(chains);
    call.run_on_gpu();
    const PagedCall::Results of_chains = call.fetch();
    call.tree_words.emplace(all);
    call.run_on_gpu();
    ASSERT_TRUE(call.fetch() == of_chains) << "bits of later queries count for something";
    call.tree_words.reset();
    call.run_on_cpu();
    call.expect_what_the_cpu_gave(of_chains);
}

class CudaTreeMaskTest : public ::testing::TestWithParam<unsigned> {};

// Few rows a KV head.
TEST_P(CudaTreeMaskTest, DecodeKernels) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t head_dim = random.pick({64, 80, 96, 128, 128, 192, 256}),
                  most_rows = head_dim > 128 ? 8 : 16;
    const int64_t group_size = random.pick({1, 2, 3, 4, 8}),
                  num_kv_heads = scaled_heads(random.pick({1, 2, 8}));
    const auto seqlen_q = static_cast<int32_t>(most_rows / group_size);
    std::vector<int32_t> lengths_q, lengths_k;
    for (int32_t b = random.pick({1, 3, 40}); b > 0; --b) {
        lengths_q.push_back(random.one_in(3) ? seqlen_q : static_cast<int32_t>(random.up_to(seqlen_q)));
        lengths_k.push_back(lengths_q.back() + random.pick({0, 1, 9, 31, 300, 2100}));
    }
    lengths_q[0] = seqlen_q;
    lengths_k[0] = std::max(lengths_k[0], seqlen_q);
    if (is_small_scale()) {
        lengths_q.resize(std::min<size_t>(lengths_q.size(), 3));
        lengths_k.resize(lengths_q.size());
        for (int32_t& length : lengths_k) length = scaled_length(length);
    }
    Cache cache(random, lengths_k, random.pick({1, 16, 24, 256}), num_kv_heads, head_dim, dtype);
    PagedCall call(random, cache, lengths_q, num_kv_heads * group_size, dtype);
    call.options.max_seqlen_q = seqlen_q;
    pick_options(random, call);
    call.options.attention_chunk = 0;  // which decode kernels serve with one query of each sequence
    call.with_alibi = random.one_in(4);
    expect_every_decode_right(call);
    call.options.batch_invariant = true;
    call.expect_the_same_alone();
    call.options.batch_invariant = false;
    expect_chains_to_be_causal(call);
}

// Trees of up to 64 queries, whose keys may be shared out, beside chunks and single queries.
TEST_P(CudaTreeMaskTest, ManyRows) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t head_dim = random.pick({64, 96, 128, 128, 192, 256});
    const int64_t group_size = random.pick({1, 3, 4, 5, 8}), num_kv_heads = random.pick({1, 2, 8});
    std::vector<int32_t> lengths_q{64}, lengths_k{64 + random.pick({0, 1, 63, 1000, 4001})};
    for (int32_t b = random.pick({0, 0, 2, 12, 40}); b > 0; --b) {
        lengths_q.push_back(random.pick({64, 64, 63, 33, 17, 1, 0, 65, 130}));
        lengths_k.push_back(lengths_q.back() + random.pick({0, 1, 17, 70, 130, 1000}));
    }
    Cache cache(random, lengths_k, random.pick({1, 5, 8, 16, 24, 256}), num_kv_heads, head_dim, dtype);
    PagedCall call(random, cache, lengths_q, num_kv_heads * group_size, dtype);
    call.options.max_seqlen_q = *std::max_element(lengths_q.begin(), lengths_q.end());
    pick_options(random, call);
    call.with_alibi = random.one_in(4);
    const Explanation text = call.explained();
    if (kind_of(text) == "sm90_attention") {
        EXPECT_EQ(field(text, "feature"), "tree");
    }
    call.run_on_cpu();
    call.expect_right(paged_attention);
    auto by_sm80 = [](const AttentionParams& p, const cuda::Gpu& gpu, std::string*) {
        return std::optional(cuda::plan_sm80_attention(p, gpu));
    };
    call.expect_right([&](const PagedAttentionArgs& args) { run_by(by_sm80, args); });
    call.options.batch_invariant = true;
    call.expect_right(paged_attention);
    call.expect_the_same_alone();
    call.options.batch_invariant = false;
    expect_chains_to_be_causal(call);
}

// Over codes.
TEST_P(CudaTreeMaskTest, Codes) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const auto codes = random.pick({cuda::Codes::e4m3, cuda::Codes::int8, cuda::Codes::int4});
    const int64_t head_dim = random.pick({64, 128}), num_kv_heads = random.pick({1, 2});
    const int32_t seqlen_q = random.pick({4, 8, 40, 64});
    const auto lengths_q = std::vector<int32_t>(random.pick({1, 5, 20}), seqlen_q);
    Cache cache(random, longer(random, lengths_q), random.pick({1, 16, 256}), num_kv_heads, head_dim, dtype);
    PagedCall call(random, cache, lengths_q, 4 * num_kv_heads, dtype);
    call.options.max_seqlen_q = seqlen_q;
    pick_options(random, call);
    const Layout layout = pick_layout(random);
    const Scales scales = pick_scales(random, codes);
    const CodedCache coded(random, call, codes, layout, scales);
    SCOPED_TRACE(name_of(layout, scales));
    call.run_on_cpu();
    call.expect_right([&](const PagedAttentionArgs& args) { cuda::attention(coded.params(args), nullptr); });
}

// The pass behind a shared prefix has the mask. A word of no bit leaves the prefix and what follows it.
TEST_P(CudaTreeMaskTest, BehindASharedPrefix) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int32_t seqlen_q = random.pick({1, 4, 16, 64}), prefix = 512;
    std::vector<int32_t> own, queries;
    for (int32_t b = std::min(random.pick({2, 9, 40}), is_small_scale() ? 9 : 40); b > 0; --b) {
        queries.push_back(b % 5 == 4 ? 0 : seqlen_q);
        own.push_back(b % 7 == 6 ? -1 : queries.back() + random.pick({0, 0, 3, 70}));
    }
    Cache cache = Cache::with_shared_prefix(random, prefix, own, 16, 2, 128, dtype);
    PagedCall call(random, cache, queries, 8, dtype);
    call.options.max_seqlen_q = seqlen_q;
    call.options.shared_prefix_len = prefix;
    call.pick_tree_mask(random);
    std::vector<int32_t> words = call.tree_words->host;
    for (size_t i = 0; i + 1 < words.size(); i += 6) words[i] = words[i + 1] = 0;
    call.tree_words.emplace(words);
    call.run_on_cpu();
    call.expect_right([](const PagedAttentionArgs& args) {
        const AttentionParams params = check_paged_attention(args);
        cuda::run(params, cuda::make_shared_prefix_plan(params, cuda::gpu_of(0)),
                  static_cast<cudaStream_t>(args.stream));
    });
    call.expect_right(paged_attention);
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaTreeMaskTest, ::testing::Range(0u, 24u));

}  // namespace
}  // namespace octavo
