// The CUDA operators against the CPU operators, through the public headers, on random problems. Small enough
// to run under compute-sanitizer.
#include "paged_call.h"

#include <octavo/attention.h>
#include <octavo/paged_attention.h>

namespace octavo {
namespace {

class CudaTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(CudaTest, PagedAttentionAgreesWithTheCpu) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const bool decode = random.one_in(3);
    const auto lengths_q =
        decode ? std::vector<int32_t>{1, 1, 1} : random.pick<std::vector<int32_t>>({{5, 64, 0, 31, 1}, {33}});
    const auto lengths_k =
        decode ? std::vector<int32_t>{1, 257, 130}
               : random.pick<std::vector<int32_t>>({{50, 200, 64, 67, 0}, {33, 64, 0, 31, 13}});
    const int64_t batch = lengths_q.size();
    const int64_t num_kv_heads = random.pick({1, 2}), group_size = random.pick({1, 3, 5, 7, 8});
    const int64_t num_q_heads = num_kv_heads * group_size;
    const int64_t head_dim = random.pick({8, 64, 80, 96, 112, 128, 160, 256});
    Cache cache(random, {lengths_k.begin(), lengths_k.begin() + batch}, random.pick({1, 16, 17, 256}),
                num_kv_heads, head_dim, dtype);
    PagedCall call(random, cache, lengths_q, num_q_heads, dtype);
    std::vector<int32_t> prefixes(batch);
    for (int32_t& prefix : prefixes) prefix = random.pick({0, 3, 40});
    pick_masks(random, call.options);
    if (random.one_in(4)) call.options.num_splits = random.pick({1, 3, 7});
    call.packed = !decode;
    call.with_alibi = random.one_in(3);
    if (random.one_in(4)) call.prefix_lens.emplace(prefixes);
    call.run_on_gpu();
    call.expect_what_the_cpu_gives();
}

TEST_P(CudaTest, ManyQueriesAgreeWithTheCpu) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t head_dim = random.pick({64, 72, 96, 128, 128, 160, 192, 256});
    const int64_t num_kv_heads = random.pick({1, 2}), group_size = random.pick({1, 3, 4, 7, 8});
    const int64_t num_q_heads = num_kv_heads * group_size;
    const bool packed = random.one_in(2);
    // Packed: the third sequence has no query, and NaN where its neighbours' tiles reach.
    auto lengths_q = packed ? random.pick<std::vector<int32_t>>({{70, 193, 0, 1}, {257, 1, 0, 300}})
                            : std::vector<int32_t>(2, random.pick({1, 64, 200, 333}));
    auto lengths_k = packed ? random.pick<std::vector<int32_t>>({{70, 450, 40, 129}, {257, 31, 7, 300}})
                            : std::vector<int32_t>(2, random.pick({1, 64, 200, 450}));
    if (random.one_in(3)) {  // enough keys that other tiles serve, and pairs of CTAs
        lengths_q = packed ? std::vector<int32_t>{130, 500, 0, 1} : std::vector<int32_t>(2, 505);
        lengths_k = packed ? std::vector<int32_t>{130, 1203, 40, 640} : std::vector<int32_t>(2, 1033);
    }
    const int64_t batch = lengths_q.size();
    Mirror<int32_t> cu_seqlens_q(cumulative(lengths_q)), cu_seqlens_k(cumulative(lengths_k));
    const int64_t total_q = cu_seqlens_q.host.back(), total_k = cu_seqlens_k.host.back();
    Mirror<uint16_t> q(random.normal(total_q * num_q_heads * head_dim, dtype));
    std::vector<uint16_t> values[2];
    for (std::vector<uint16_t>& x : values) {
        x = random.normal(total_k * num_kv_heads * head_dim, dtype);
        if (!packed) continue;
        const auto begin = x.begin() + cu_seqlens_k.host[2] * num_kv_heads * head_dim;
        std::fill(begin, begin + lengths_k[2] * num_kv_heads * head_dim, to_bits(NAN, dtype));
    }
    Mirror<uint16_t> k(values[0]), v(values[1]), out(nans(q.host.size(), dtype));
    Mirror<float> lse(std::vector<float>(total_q * num_q_heads, NAN)), slopes(slopes_for(num_q_heads));
    Mirror<float> sinks(sinks_for(num_q_heads));
    const bool with_sinks = q.host[0] % 3 == 0;
    std::vector<int32_t> prefixes(batch);
    for (int32_t& prefix : prefixes) prefix = random.pick({0, 3, 140});
    Mirror<int32_t> prefix_lens(prefixes);

    AttentionArgs args;
    pick_masks(random, args);
    const bool with_alibi = random.one_in(3), with_prefix = random.one_in(4);
    if (random.one_in(4)) {
        args.dropout_p = 0.3;
        args.dropout_seed = GetParam();
    }
    args.alibi_symmetric = with_alibi && random.one_in(2);
    auto run = [&](auto view) {
        auto tokens_of = [&](auto& mirror, DType dtype, int64_t total, int64_t heads) {
            return packed ? view(mirror, dtype, {total, heads, head_dim})
                          : view(mirror, dtype, {batch, total / batch, heads, head_dim});
        };
        args.q = tokens_of(q, dtype, total_q, num_q_heads);
        args.out = tokens_of(out, dtype, total_q, num_q_heads);
        args.k = tokens_of(k, dtype, total_k, num_kv_heads);
        args.v = tokens_of(v, dtype, total_k, num_kv_heads);
        args.lse = packed ? view(lse, DType::float32, {total_q, num_q_heads})
                          : view(lse, DType::float32, {batch, total_q / batch, num_q_heads});
        if (packed) {
            args.cu_seqlens_q = view(cu_seqlens_q, DType::int32, {batch + 1});
            args.cu_seqlens_k = view(cu_seqlens_k, DType::int32, {batch + 1});
        }
        if (with_alibi) args.alibi_slopes = view(slopes, DType::float32, {num_q_heads});
        if (with_sinks) args.sinks = view(sinks, DType::float32, {num_q_heads});
        if (with_prefix) args.prefix_lens = view(prefix_lens, DType::int32, {batch});
        attention(args);
    };
    run(kOnGpu);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    run(kOnHost);
    expect_close(out.fetch(), out.host, dtype);
    expect_close(lse.fetch(), lse.host);
}

// Enough rows that a GPU needs no split of the keys.
TEST_P(CudaTest, PagedPrefillAgreesWithTheCpu) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t num_kv_heads = 8, group_size = random.pick({4, 7, 8});
    const int64_t num_q_heads = num_kv_heads * group_size;
    const int64_t head_dim = random.pick({64, 128, 128, 256});
    // Decode rows and chunks in one batch.
    const std::vector<int32_t> lengths_q{1, 200, 1, 64, 130, 0}, lengths_k{70, 270, 1, 64, 390, 5};
    Cache cache(random, lengths_k, random.pick({8, 16, 64, 256}), num_kv_heads, head_dim, dtype);
    PagedCall call(random, cache, lengths_q, num_q_heads, dtype);
    pick_masks(random, call.options);
    call.with_alibi = random.one_in(3);
    call.run_on_gpu();
    call.expect_what_the_cpu_gives();
}

// The lengths at which a persistent kernel hands out several tiles to each SM.
TEST(PrefillTest, LongSequencesAgreeWithTheCpu) {
    Random random(3);
    for (const int64_t head_dim : {64, 128, 192, 256}) {
        for (const int64_t seqlen : {1000, 4097}) {
            const DType dtype = DType::bfloat16;
            const int64_t num_heads = 8;
            Mirror<uint16_t> q(random.normal(seqlen * num_heads * head_dim, dtype)),
                k(random.normal(q.host.size(), dtype)), v(random.normal(q.host.size(), dtype)),
                out(nans(q.host.size(), dtype));
            AttentionArgs args;
            args.causal = true;
            auto run = [&](auto view) {
                args.q = view(q), args.k = view(k), args.v = view(v), args.out = view(out);
                attention(args);
            };
            // Twice: the second launch meets what the first left behind.
            for (int i = 0; i < 2; ++i) {
                run([&](auto& mirror) { return mirror.on_gpu(dtype, {1, seqlen, num_heads, head_dim}); });
            }
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            run([&](auto& mirror) { return mirror.on_host(dtype, {1, seqlen, num_heads, head_dim}); });
            expect_close(out.fetch(), out.host, dtype);
        }
    }
}

TEST_P(CudaTest, DenseAttentionOnUnalignedRowsAgreesWithTheCpu) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t batch = 2, num_kv_heads = random.pick({1, 2}), group_size = random.pick({1, 3, 4});
    const int64_t num_q_heads = num_kv_heads * group_size;
    const int64_t seqlen_q = random.pick({1, 37, 130}), seqlen_k = random.pick({1, 64, 131});
    const int64_t head_dim = random.pick({64, 72, 128});
    const int64_t gap = random.one_in(2) ? 3 : 0;  // elements between heads: rows off every 16-byte boundary
    const int64_t row = head_dim + gap;
    Mirror<uint16_t> q(random.normal(batch * seqlen_q * num_q_heads * row, dtype));
    Mirror<uint16_t> k(random.normal(batch * seqlen_k * num_kv_heads * row, dtype));
    Mirror<uint16_t> v(random.normal(k.host.size(), dtype));
    Mirror<uint16_t> out(nans(q.host.size(), dtype));
    Mirror<float> lse(std::vector<float>(batch * seqlen_q * num_q_heads, NAN));

    AttentionArgs args;
    args.causal = random.one_in(2);
    if (random.one_in(3)) args.window_left = 20;
    if (random.one_in(3)) args.window_right = 9;
    auto run = [&](auto view) {
        auto heads_of = [&](auto& mirror, int64_t seqlen, int64_t heads) {
            TensorView t = view(mirror, dtype, {batch, seqlen, heads, row});
            t.shape[3] = head_dim;
            return t;
        };
        args.q = heads_of(q, seqlen_q, num_q_heads);
        args.out = heads_of(out, seqlen_q, num_q_heads);
        args.k = heads_of(k, seqlen_k, num_kv_heads);
        args.v = heads_of(v, seqlen_k, num_kv_heads);
        args.lse = view(lse, DType::float32, {batch, seqlen_q, num_q_heads});
        attention(args);
    };
    run(kOnGpu);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    run(kOnHost);
    expect_rows_close(out.fetch(), out.host, dtype, head_dim, row);
    expect_close(lse.fetch(), lse.host);
}

TEST_P(CudaTest, AppendAndCopyEqualTheCpuBitForBit) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t num_kv_heads = random.pick({1, 3}), head_dim = random.pick({4, 8, 64, 80});
    Cache cache(random, {0, 40, 1, 77}, random.pick({1, 16, 17}), num_kv_heads, head_dim, dtype);
    Mirror<int32_t> cu_seqlens(cumulative({1, 7, 1, 77})), table(cache.table), lengths(cache.lengths);
    const int64_t total = cu_seqlens.host.back();
    Mirror<uint16_t> k(random.normal(total * num_kv_heads * head_dim, dtype)),
        v(random.normal(k.host.size(), dtype));
    Mirror<uint16_t> k_pages(cache.k), v_pages(cache.v);
    std::vector<int32_t> unused;
    for (int32_t page = 0; page < cache.num_pages; ++page) {
        if (std::find(cache.table.begin(), cache.table.end(), page) == cache.table.end())
            unused.push_back(page);
    }
    Mirror<int32_t> copies(
        {cache.table[cache.max_pages], unused[0], cache.table[3 * cache.max_pages], unused[1]});

    AppendKvArgs append;
    if (random.one_in(2)) append.k_scale = 0.5f;
    CopyPagesArgs copy;
    auto run = [&](auto view) {
        append.k = view(k, dtype, {total, num_kv_heads, head_dim});
        append.v = view(v, dtype, {total, num_kv_heads, head_dim});
        append.k_pages = view(k_pages, dtype, {cache.num_pages, cache.page_size, num_kv_heads, head_dim});
        append.v_pages = view(v_pages, dtype, {cache.num_pages, cache.page_size, num_kv_heads, head_dim});
        append.page_table = view(table, DType::int32, {cache.batch, cache.max_pages});
        append.seq_lens = view(lengths, DType::int32, {cache.batch});
        append.cu_seqlens = view(cu_seqlens, DType::int32, {cache.batch + 1});
        append_kv(append);
        copy.k_pages = append.k_pages;
        copy.v_pages = append.v_pages;
        copy.copies = view(copies, DType::int32, {2, 2});
        copy_pages(copy);
    };
    run(kOnGpu);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    run(kOnHost);
    EXPECT_EQ(k_pages.fetch(), k_pages.host);
    EXPECT_EQ(v_pages.fetch(), v_pages.host);
}

TEST_P(CudaTest, MergeStatesAgreesWithTheCpu) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t rows = 13, heads = 3, head_dim = random.pick({8, 80});
    const size_t count = rows * heads * head_dim;
    Mirror<uint16_t> out_a(random.normal(count, dtype)), out_b(random.normal(count, dtype)),
        out(nans(count, dtype));
    std::vector<float> lse_values(rows * heads);
    for (float& value : lse_values) value = random.pick({-INFINITY, -3.0f, 0.5f, 40.0f});
    Mirror<float> lse_a(lse_values);
    std::shuffle(lse_values.begin(), lse_values.end(), random.engine());
    Mirror<float> lse_b(lse_values), lse(std::vector<float>(rows * heads, NAN));
    MergeStatesArgs args;
    auto run = [&](auto view) {
        args.out_a = view(out_a, dtype, {rows, heads, head_dim});
        args.out_b = view(out_b, dtype, {rows, heads, head_dim});
        args.out = view(out, dtype, {rows, heads, head_dim});
        args.lse_a = view(lse_a, DType::float32, {rows, heads});
        args.lse_b = view(lse_b, DType::float32, {rows, heads});
        args.lse = view(lse, DType::float32, {rows, heads});
        merge_states(args);
    };
    run(kOnGpu);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    run(kOnHost);
    expect_close(out.fetch(), out.host, dtype);
    expect_close(lse.fetch(), lse.host);
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaTest, ::testing::Range(0u, 24u));

// Rows that overlap, descend or lie apart are found on the GPU as on the CPU.
TEST(CudaPageTable, RowsOfAnyStrideAreChecked) {
    constexpr int64_t kRows = 3, kPages = 2, kFirst = 6;
    Mirror<int32_t> numbers({5, 0, 4, 1, 3, 2, 6, 2, 3, 1, 4, 0, 5}), lengths({8, 8, 8});
    Mirror<int64_t> wide(std::vector<int64_t>(numbers.host.begin(), numbers.host.end()));
    auto refused = [&](auto on, auto& array, DType dtype, int64_t stride, int64_t num_pages) {
        TensorView table = on(array, dtype, {kRows, kPages});
        table.data = static_cast<char*>(table.data) + kFirst * size_of(dtype);
        table.strides[0] = stride;
        try {
            check_page_table(table, on(lengths, DType::int32, {kRows}), num_pages, 4);
        } catch (const ValueError& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    for (int64_t stride : {-3, -2, -1, 0, 1, 2}) {
        for (int64_t num_pages = 0; num_pages <= 7; ++num_pages) {
            EXPECT_EQ(refused(kOnGpu, numbers, DType::int32, stride, num_pages),
                      refused(kOnHost, numbers, DType::int32, stride, num_pages))
                << stride;
            EXPECT_EQ(refused(kOnGpu, wide, DType::int64, stride, num_pages),
                      refused(kOnHost, wide, DType::int64, stride, num_pages))
                << stride;
        }
    }
}

}  // namespace
}  // namespace octavo
