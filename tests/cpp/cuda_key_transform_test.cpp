// Keys that are shifted, scaled and rotated before they become codes: the GPU against the CPU, by the public
// operators. Codes and scales are the same bit for bit.
#include "cuda_testing.h"

#include <octavo/paged_attention.h>

#include <cstring>
#include <tuple>

namespace octavo {
namespace {

struct Transform {
    bool offset, scale, rotates;
};

class CudaKeyTransformTest : public ::testing::TestWithParam<std::tuple<int64_t, bool, int>> {};

TEST_P(CudaKeyTransformTest, AppendAndAttend) {
    const auto [head_dim, packed, which] = GetParam();
    const Transform transform{(which & 1) != 0, (which & 2) != 0, (which & 4) != 0};
    constexpr int64_t kHeads = 2, kGroup = 4, kPage = 16, kBatch = 3, kMaxPages = 5,
                      kPages = kBatch * kMaxPages;
    Random random(static_cast<unsigned>(head_dim) + which);
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const std::vector<int32_t> lengths{70, 1, 33};
    const std::vector<int32_t> lengths_q =
        packed ? std::vector<int32_t>{40, 1, 0} : std::vector<int32_t>{1, 1, 1};
    const int64_t tokens = 104, queries = packed ? 41 : kBatch;
    auto floats = [&](float low, float high) {
        std::uniform_real_distribution<float> numbers(low, high);
        std::vector<float> values(kHeads * head_dim);
        for (float& x : values) x = numbers(random.engine());
        return values;
    };
    Mirror<uint16_t> k(random.normal(tokens * kHeads * head_dim, dtype));
    Mirror<uint16_t> v(random.normal(tokens * kHeads * head_dim, dtype));
    Mirror<uint16_t> q(random.normal(queries * kHeads * kGroup * head_dim, dtype));
    Mirror<uint16_t> out(nans(queries * kHeads * kGroup * head_dim, dtype));
    Mirror<float> lse(std::vector<float>(queries * kHeads * kGroup, NAN));
    Mirror<float> offset(floats(-1.0f, 1.0f)), scale(floats(0.5f, 2.0f));
    Mirror<uint8_t> k_pages(std::vector<uint8_t>(kPages * kPage * kHeads * head_dim, 0xff));
    Mirror<uint8_t> v_pages(std::vector<uint8_t>(kPages * kPage * kHeads * head_dim, 0xff));
    Mirror<float> k_scales(std::vector<float>(kPages * kPage * kHeads, NAN));
    Mirror<float> v_scales(std::vector<float>(kPages * kPage * kHeads, NAN));
    std::vector<int32_t> pages(kPages);
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
    std::shuffle(pages.begin(), pages.end(), random.engine());
    Mirror<int32_t> table(pages), seq_lens(lengths), cu_tokens(cumulative(lengths)),
        cu_queries(cumulative(lengths_q));

    auto run = [&](auto on) {
        auto cache = [&](auto& args) {
            args.k_pages = on(k_pages, DType::int8, {kPages, kPage, kHeads, head_dim});
            args.v_pages = on(v_pages, DType::int8, {kPages, kPage, kHeads, head_dim});
            args.k_scales = on(k_scales, DType::float32, {kPages, kPage, kHeads});
            args.v_scales = on(v_scales, DType::float32, {kPages, kPage, kHeads});
            args.page_table = on(table, DType::int32, {kBatch, kMaxPages});
            args.seq_lens = on(seq_lens, DType::int32, {kBatch});
            if (transform.offset) args.k_channel_offset = on(offset, DType::float32, {kHeads, head_dim});
            if (transform.scale) args.k_channel_scale = on(scale, DType::float32, {kHeads, head_dim});
            args.rotate_keys = transform.rotates;
        };
        AppendKvArgs append;
        append.k = on(k, dtype, {tokens, kHeads, head_dim});
        append.v = on(v, dtype, {tokens, kHeads, head_dim});
        append.cu_seqlens = on(cu_tokens, DType::int32, {kBatch + 1});
        cache(append);
        append_kv(append);
        PagedAttentionArgs attend;
        attend.q = on(q, dtype, {queries, kHeads * kGroup, head_dim});
        attend.out = on(out, dtype, {queries, kHeads * kGroup, head_dim});
        attend.lse = on(lse, DType::float32, {queries, kHeads * kGroup});
        if (packed) attend.cu_seqlens_q = on(cu_queries, DType::int32, {kBatch + 1});
        cache(attend);
        paged_attention(attend);
    };
    run(kOnHost);
    run(kOnGpu);
    EXPECT_EQ(k_pages.fetch(), k_pages.host);
    EXPECT_EQ(v_pages.fetch(), v_pages.host);
    auto bits = [](const std::vector<float>& values) {
        std::vector<uint32_t> words(values.size());
        std::memcpy(words.data(), values.data(), words.size() * sizeof(uint32_t));
        return words;
    };
    EXPECT_EQ(bits(k_scales.fetch()), bits(k_scales.host));
    expect_close(out.fetch(), out.host, dtype);
    const std::vector<float> lse_on_gpu = lse.fetch();
    for (size_t i = 0; i < lse_on_gpu.size(); ++i) EXPECT_NEAR(lse_on_gpu[i], lse.host[i], 2e-2f) << i;
}

INSTANTIATE_TEST_SUITE_P(All, CudaKeyTransformTest,
                         ::testing::Combine(::testing::Values(8, 64, 80, 128, 256), ::testing::Bool(),
                                            ::testing::Range(0, 8)));

}  // namespace
}  // namespace octavo
