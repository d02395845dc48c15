// A shared prefix on CUDA against the CPU: batches whose prefix is worked through by every kernel that can.
#include "cuda_testing.h"

#include <octavo/paged_attention.h>

#include <string>

namespace octavo {
namespace {

struct CascadeCase {
    std::string name;
    int32_t prefix;
    std::vector<int32_t> own, queries;  // of each sequence: keys behind the prefix; -1: padding
    int64_t num_kv_heads, group_size, page_size = 16;
};

class CudaCascadeTest : public ::testing::TestWithParam<CascadeCase> {};

// A table of sequences that begin with the pages of the cache's first one, before those of another each. One
// of length 0 names no page; but the first row always tells the prefix.
std::vector<int32_t> make_table(const Cache& cache, const CascadeCase& c) {
    const int64_t num_shared = c.prefix / c.page_size, max_pages = num_shared + cache.max_pages;
    std::vector<int32_t> table(c.own.size() * max_pages, 1 << 30);
    for (size_t b = 0; b < c.own.size(); ++b) {
        const auto row = table.begin() + b * max_pages;
        if (b == 0 || c.own[b] >= 0) std::copy_n(cache.table.begin(), num_shared, row);
        std::copy_n(cache.table.begin() + (b + 1) * cache.max_pages, cache.max_pages, row + num_shared);
    }
    return table;
}

TEST_P(CudaCascadeTest, AgreesWithTheCpu) {
    const CascadeCase& c = GetParam();
    unsigned seed = c.prefix;
    for (const int64_t head_dim : {64, 80, 128, 192, 256}) {
        SCOPED_TRACE("head_dim " + std::to_string(head_dim));
        Random random(seed++);
        const DType dtype = random.pick({DType::float16, DType::bfloat16});
        std::vector<int32_t> in_cache{c.prefix}, lengths;
        for (const int32_t own : c.own) {
            in_cache.push_back(std::max(own, 0));
            lengths.push_back(own < 0 ? 0 : c.prefix + own);
        }
        Cache cache(random, in_cache, c.page_size, c.num_kv_heads, head_dim, dtype);
        const int64_t batch = lengths.size(), num_q_heads = c.num_kv_heads * c.group_size;
        const int64_t max_pages = c.prefix / c.page_size + cache.max_pages;
        const std::vector<int32_t> queries = c.queries.empty() ? std::vector<int32_t>(batch, 1) : c.queries;
        Mirror<int32_t> cu_seqlens_q(cumulative(queries)), table(make_table(cache, c)), seq_lens(lengths);
        const int64_t total_q = cu_seqlens_q.host.back();
        Mirror<uint16_t> q(random.normal(total_q * num_q_heads * head_dim, dtype)), k(cache.k), v(cache.v);
        Mirror<uint16_t> out(nans(q.host.size(), dtype));
        Mirror<float> lse(std::vector<float>(total_q * num_q_heads, NAN));

        PagedAttentionArgs args;
        args.causal = !random.one_in(3);
        if (random.one_in(3)) args.softcap = 20.0;
        args.v_scale = random.pick({1.0f, 0.5f});
        const bool with_lse = !random.one_in(3);
        auto set = [&](auto view) {
            args.q = view(q, dtype, {total_q, num_q_heads, head_dim});
            args.out = view(out, dtype, {total_q, num_q_heads, head_dim});
            if (with_lse) args.lse = view(lse, DType::float32, {total_q, num_q_heads});
            args.k_pages = view(k, dtype, {cache.num_pages, c.page_size, c.num_kv_heads, head_dim});
            args.v_pages = view(v, dtype, {cache.num_pages, c.page_size, c.num_kv_heads, head_dim});
            args.page_table = view(table, DType::int32, {batch, max_pages});
            args.seq_lens = view(seq_lens, DType::int32, {batch});
            if (!c.queries.empty()) args.cu_seqlens_q = view(cu_seqlens_q, DType::int32, {batch + 1});
        };
        using Shape = std::initializer_list<int64_t>;
        set([](auto& mirror, DType dtype, Shape shape) { return mirror.on_gpu(dtype, shape); });
        args.shared_prefix_len = c.prefix;
        EXPECT_EQ(kind_of(args), "shared_prefix");
        paged_attention(args);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const std::vector<uint16_t> first_bits = out.fetch();
        paged_attention(args);  // meets what the first call left behind
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const std::vector<uint16_t> out_bits = out.fetch();
        const std::vector<float> lse_values = lse.fetch();
        ASSERT_EQ(first_bits, out_bits) << "from call to call";

        set([](auto& mirror, DType dtype, Shape shape) { return mirror.on_host(dtype, shape); });
        args.shared_prefix_len = 0;
        paged_attention(args);
        expect_close(out_bits, out.host, dtype);
        if (with_lse) expect_close(lse_values, lse.host);
    }
}

std::vector<int32_t> ragged(size_t batch, int32_t most) {
    std::vector<int32_t> lengths(batch);
    for (size_t i = 0; i < batch; ++i) lengths[i] = 1 + static_cast<int32_t>(i * 37 % most);
    return lengths;
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CudaCascadeTest,
    ::testing::Values(CascadeCase{"few_rows", 640, {3, 17, 200}, {}, 2, 4},
                      CascadeCase{"one_sequence", 1024, {40}, {}, 2, 8},
                      CascadeCase{"many_runs", 4096, ragged(40, 90), {}, 2, 4},
                      CascadeCase{"a_run_for_each_head", 1040, ragged(33, 300), {}, 9, 2},
                      CascadeCase{"many_row_tiles", 528, ragged(300, 20), {}, 4, 4},
                      CascadeCase{"odd_pages", 605, ragged(50, 40), {}, 2, 7, 5},
                      CascadeCase{"large_pages", 3 * 520, ragged(50, 40), {}, 8, 4, 520},
                      CascadeCase{"padding", 320, {-1, 1, -1, 400, -1, 16}, {}, 3, 5},
                      CascadeCase{"more_than_a_launch", 64, ragged(1030, 5), {}, 1, 2},
                      CascadeCase{"chunks", 512, {200, 1, 64, 300, 1, -1}, {200, 1, 0, 64, 1, 0}, 2, 4},
                      CascadeCase{"packed_decode", 768, ragged(30, 60), std::vector<int32_t>(30, 1), 4, 4}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace octavo
