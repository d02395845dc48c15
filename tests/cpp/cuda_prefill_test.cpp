// Batches that decode, verify drafts and prefill at once, with row tiles for more than half of the SMs: the
// prefill kernel where there is one, with row tiles of few rows and of many.
#include "cuda_testing.h"

#include <octavo/paged_attention.h>

namespace octavo {
namespace {

class CudaPrefillTest : public ::testing::TestWithParam<unsigned> {
  protected:
    void run(bool batch_invariant);
};

// Mostly sequences with one query; drafts, whole row tiles and ends of row tiles of any length among them.
std::vector<int32_t> mixed_lengths_q(Random& random) {
    std::vector<int32_t> lengths(50, 1);
    for (int32_t length : {2, 3, 4, 5, 9, 32, 128, 129, 0, 230, 193, 64}) lengths.push_back(length);
    std::shuffle(lengths.begin(), lengths.end(), random.engine());
    return lengths;
}

void CudaPrefillTest::run(bool batch_invariant) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t num_kv_heads = random.pick({2, 3}), group_size = random.pick({1, 3, 4, 8});
    const int64_t num_q_heads = num_kv_heads * group_size;
    const int64_t head_dim = random.pick({64, 96, 128, 128, 128, 120, 192, 256});
    const std::vector<int32_t> lengths_q = mixed_lengths_q(random);
    std::vector<int32_t> lengths_k;
    for (int32_t length : lengths_q)
        lengths_k.push_back(length + random.pick({0, 1, 15, 127, 128, 300, 615}));
    const int64_t batch = lengths_q.size();
    Cache cache(random, lengths_k, random.pick({8, 16, 24, 256}), num_kv_heads, head_dim, dtype);
    const std::vector<int32_t> begins = cumulative(lengths_q);
    const int64_t total_q = begins.back(), row = num_q_heads * head_dim;
    Mirror<int32_t> cu_seqlens_q(begins), table(cache.table), lengths(cache.lengths);
    Mirror<uint16_t> q(random.normal(total_q * row, dtype)), k(cache.k), v(cache.v);
    Mirror<uint16_t> out(nans(q.host.size(), dtype));
    Mirror<float> lse(std::vector<float>(total_q * num_q_heads, NAN)), slopes(slopes_for(num_q_heads));

    PagedAttentionArgs args;
    pick_masks(random, args);
    args.batch_invariant = batch_invariant;
    args.max_seqlen_q = random.pick({230, 257});
    const bool with_alibi = random.one_in(4);
    auto set = [&](auto view) {
        args.q = view(q, dtype, {total_q, num_q_heads, head_dim});
        args.out = view(out, dtype, {total_q, num_q_heads, head_dim});
        args.lse = view(lse, DType::float32, {total_q, num_q_heads});
        args.k_pages = view(k, dtype, {cache.num_pages, cache.page_size, num_kv_heads, head_dim});
        args.v_pages = view(v, dtype, {cache.num_pages, cache.page_size, num_kv_heads, head_dim});
        args.page_table = view(table, DType::int32, {batch, cache.max_pages});
        args.seq_lens = view(lengths, DType::int32, {batch});
        args.cu_seqlens_q = view(cu_seqlens_q, DType::int32, {batch + 1});
        if (with_alibi) args.alibi_slopes = view(slopes, DType::float32, {num_q_heads});
    };
    using Shape = std::initializer_list<int64_t>;
    set([](auto& mirror, DType dtype, Shape shape) { return mirror.on_gpu(dtype, shape); });
    paged_attention(args);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<uint16_t> out_bits = out.fetch();
    const std::vector<float> lse_values = lse.fetch();
    for (int64_t b = 0; batch_invariant && b < batch; b += 3) {
        Mirror<int32_t> own_begins({0, lengths_q[b]});
        Mirror<uint16_t> own_out(nans(lengths_q[b] * row, dtype));
        Mirror<float> own_lse(std::vector<float>(lengths_q[b] * num_q_heads, NAN));
        PagedAttentionArgs own = args;
        auto cut = [](TensorView& view, int64_t begin, int64_t count) {
            view.data = static_cast<char*>(view.data) + begin * view.strides[0] * size_of(view.dtype);
            view.shape[0] = count;
        };
        cut(own.q, begins[b], lengths_q[b]);
        cut(own.page_table, b, 1);
        own.page_table.shape[1] = lengths_k[b] / cache.page_size + 1;
        cut(own.seq_lens, b, 1);
        own.out = own_out.on_gpu(dtype, {lengths_q[b], num_q_heads, head_dim});
        own.lse = own_lse.on_gpu(DType::float32, {lengths_q[b], num_q_heads});
        own.cu_seqlens_q = own_begins.on_gpu(DType::int32, {2});
        paged_attention(own);
        const auto own_bits = own_out.fetch();
        ASSERT_TRUE(std::equal(own_bits.begin(), own_bits.end(), out_bits.begin() + begins[b] * row))
            << "sequence " << b;
        const auto own_values = own_lse.fetch();
        ASSERT_TRUE(
            std::equal(own_values.begin(), own_values.end(), lse_values.begin() + begins[b] * num_q_heads))
            << "sequence " << b;
    }
    set([](auto& mirror, DType dtype, Shape shape) { return mirror.on_host(dtype, shape); });
    paged_attention(args);
    expect_close(out_bits, out.host, dtype);
    expect_close(lse_values, lse.host);
}

TEST_P(CudaPrefillTest, AgreesWithTheCpu) { run(false); }

// And every sequence alone has the bits that it has in the batch.
TEST_P(CudaPrefillTest, BatchInvariant) { run(true); }

INSTANTIATE_TEST_SUITE_P(Seeds, CudaPrefillTest, ::testing::Range(0u, 40u));

}  // namespace
}  // namespace octavo
