// append_kv with a rotary embedding: the GPU against the CPU, bit for bit, in caches of floats and of codes.
#include "cuda_testing.h"

#include <octavo/paged_attention.h>

#include <cstring>
#include <tuple>

namespace octavo {
namespace {

// The dtype of the pages (uint8: int4), and a seed.
class CudaRotaryTest : public ::testing::TestWithParam<std::tuple<DType, unsigned>> {};

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
    std::vector<uint32_t> words(values.size());
    std::memcpy(words.data(), values.data(), words.size() * sizeof(uint32_t));
    return words;
}

TEST_P(CudaRotaryTest, EqualsTheCpuBitForBit) {
    const auto [stored, seed] = GetParam();
    Random random(seed);
    const DType dtype = stored == DType::float16 || stored == DType::bfloat16
                            ? stored
                            : random.pick({DType::float16, DType::bfloat16});
    const bool has_codes = stored != dtype, is_int4 = stored == DType::uint8, packed = random.one_in(2);
    const int64_t head_dim = random.pick({8, 60, 64, 80, 96, 128, 256});
    const int64_t rotary_dim = random.pick({head_dim, head_dim / 4 * 2, int64_t{2}});
    const int64_t kv_heads = random.pick({1, 2, 8}), q_heads = random.pick({0, 3, 8, 32});
    const int64_t page_size = random.pick({1, 16, 17}), max_pages = 80 / page_size + 1, batch = 4;
    const std::vector<int32_t> lengths{40, 0, 1, 77};  // the second is padding
    const std::vector<int32_t> counts =
        packed ? std::vector<int32_t>{7, 2, 1, 60} : std::vector<int32_t>(4, 1);
    const bool interleaved = random.one_in(2), in_place = random.one_in(2),
               has_float_tables = random.one_in(2);
    const int64_t gap = random.pick({0, 0, 3});  // numbers between heads

    Mirror<int32_t> cu_seqlens(cumulative(counts)), seq_lens(lengths);
    const int64_t total = cu_seqlens.host.back(), row = head_dim + gap;
    std::vector<int32_t> pages(batch * max_pages);
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
    std::shuffle(pages.begin(), pages.end(), random.engine());
    const auto num_pages = static_cast<int64_t>(pages.size());
    Mirror<int32_t> table(pages);
    Mirror<uint16_t> k(random.normal(total * kv_heads * row, dtype)),
        v(random.normal(total * kv_heads * row, dtype)), q(random.normal(total * q_heads * row, dtype)),
        q_out(nans(q.host.size(), dtype));
    Mirror<uint16_t> cos(random.normal(80 * rotary_dim / 2, dtype)),
        sin(random.normal(80 * rotary_dim / 2, dtype));
    std::vector<float> numbers(cos.host.size());
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = 1.0001f * from_bits(cos.host[i], dtype);
    Mirror<float> float_cos(numbers), float_sin(numbers);
    const int64_t stored_dim = is_int4 ? head_dim / 2 : head_dim;
    const int64_t slots = num_pages * page_size * kv_heads;
    Mirror<uint16_t> k_pages(nans(slots * head_dim, dtype)), v_pages(nans(slots * head_dim, dtype));
    Mirror<uint8_t> k_codes(std::vector<uint8_t>(slots * stored_dim, 0xff)), v_codes(k_codes.host);
    Mirror<float> k_scales(std::vector<float>(slots, -1.0f)), v_scales(k_scales.host);

    AppendKvArgs args;
    args.rotary_interleaved = interleaved;
    if (!has_codes && random.one_in(3)) args.k_scale = 0.3f;
    if (has_codes) args.rotate_keys = random.one_in(2);
    if (is_int4) args.kv_dtype = DType::int4;
    auto run = [&](auto on) {
        auto heads_of = [&](Mirror<uint16_t>& mirror, int64_t heads) {
            TensorView t = on(mirror, dtype, {total, heads, row});
            t.shape[2] = head_dim;
            return t;
        };
        args.k = heads_of(k, kv_heads);
        args.v = heads_of(v, kv_heads);
        if (q_heads > 0) {
            args.q = heads_of(q, q_heads);
            args.q_out = heads_of(in_place ? q : q_out, q_heads);
        }
        if (has_codes) {
            args.k_pages = on(k_codes, stored, {num_pages, page_size, kv_heads, stored_dim});
            args.v_pages = on(v_codes, stored, {num_pages, page_size, kv_heads, stored_dim});
            auto scales = [&](Mirror<float>& mirror) {
                if (is_int4) return on(mirror, DType::float16, {num_pages, page_size, kv_heads, 2});
                return on(mirror, DType::float32, {num_pages, page_size, kv_heads});
            };
            args.k_scales = scales(k_scales);
            args.v_scales = scales(v_scales);
        } else {
            args.k_pages = on(k_pages, dtype, {num_pages, page_size, kv_heads, head_dim});
            args.v_pages = on(v_pages, dtype, {num_pages, page_size, kv_heads, head_dim});
        }
        args.page_table = on(table, DType::int32, {batch, max_pages});
        args.seq_lens = on(seq_lens, DType::int32, {batch});
        if (packed) args.cu_seqlens = on(cu_seqlens, DType::int32, {batch + 1});
        auto angles = [&](Mirror<float>& floats, Mirror<uint16_t>& halves) {
            return has_float_tables ? on(floats, DType::float32, {80, rotary_dim / 2})
                                    : on(halves, dtype, {80, rotary_dim / 2});
        };
        args.rotary_cos = angles(float_cos, cos);
        args.rotary_sin = angles(float_sin, sin);
        append_kv(args);
    };
    run(kOnGpu);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    run(kOnHost);
    EXPECT_EQ(k_pages.fetch(), k_pages.host);
    EXPECT_EQ(v_pages.fetch(), v_pages.host);
    EXPECT_EQ(k_codes.fetch(), k_codes.host);
    EXPECT_EQ(v_codes.fetch(), v_codes.host);
    EXPECT_EQ(bits_of(k_scales.fetch()), bits_of(k_scales.host));
    EXPECT_EQ(bits_of(v_scales.fetch()), bits_of(v_scales.host));
    EXPECT_EQ(q.fetch(), q.host);
    EXPECT_EQ(q_out.fetch(), q_out.host);  // and nothing between heads
}

INSTANTIATE_TEST_SUITE_P(All, CudaRotaryTest,
                         ::testing::Combine(::testing::Values(DType::float16, DType::bfloat16, DType::int8,
                                                              DType::float8_e4m3fn, DType::float8_e5m2,
                                                              DType::uint8),
                                            ::testing::Range(0u, 16u)));

}  // namespace
}  // namespace octavo
