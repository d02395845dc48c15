// latent_attention on a GPU against the CPU: row tiles, splits, pages, fp8, strides.
#include "cuda_testing.h"

#include <octavo/latent_attention.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <optional>
#include <vector>

namespace octavo {
namespace {

constexpr int64_t kQkDim = 576, kVDim = 512;

struct Sequence {
    int32_t queries, keys;
};

// Compares a random call for these sequences, each with so many splits, with what the CPU gives. Sequences
// are packed if one of them has other than one query; `max_seqlen_q` is given then, or not, or always.
void agrees_with_the_cpu(Random& random, const std::vector<Sequence>& sequences, int64_t heads,
                         const std::vector<std::optional<int64_t>>& all_splits, bool has_bound = false) {
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const bool is_fp8 = random.one_in(2);
    const bool is_packed =
        std::any_of(sequences.begin(), sequences.end(), [](const Sequence& s) { return s.queries != 1; });
    const int64_t batch = sequences.size(), page_size = random.pick({1, 7, 16, 32, 64, 128});
    const int64_t gap = random.pick({0, 0, 16, 1});  // elements between the rows of q, and of the cache
    const int64_t row = kQkDim + gap;

    std::vector<int32_t> lengths, offsets = {0};
    int64_t max_pages = 1, num_pages = 1;
    for (const Sequence& sequence : sequences) {
        lengths.push_back(sequence.keys);
        offsets.push_back(offsets.back() + sequence.queries);
        max_pages = std::max(max_pages, lengths.back() / page_size + 1);
        num_pages += lengths.back() / page_size + 1;
    }
    if (random.one_in(4)) max_pages *= 2;  // lengths are known to be shorter than the page table allows
    const int64_t total_q = offsets.back();
    std::vector<int32_t> order(num_pages), table(batch * max_pages, 1 << 30);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random.engine());
    std::vector<uint8_t> is_used(num_pages * page_size, 0);
    for (int64_t b = 0, next = 0; b < batch; ++b) {
        for (int64_t i = 0; i * page_size < lengths[b]; ++i) table[b * max_pages + i] = order[next++];
        for (int64_t k = 0; k < lengths[b]; ++k)
            is_used[table[b * max_pages + k / page_size] * page_size + k % page_size] = 1;
    }
    std::vector<uint16_t> keys = random.normal(num_pages * page_size * row, dtype);
    std::vector<uint8_t> codes(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
        // Codes up to 3.75, and NaN where nobody may look.
        codes[i] = static_cast<uint8_t>((random.engine()() & 0x80) | random.engine()() % 0x48);
        if (!is_used[i / row]) keys[i] = to_bits(NAN, dtype), codes[i] = 0x7f;
    }
    std::vector<uint16_t> queries = random.normal(total_q * heads * row, dtype);
    if (random.one_in(2)) {  // queries of different magnitudes
        for (int64_t r = 0; r < total_q * heads; ++r) {
            const float factor = random.pick({0x1p-20f, 0.25f, 1.0f, 16.0f});
            for (int64_t i = r * row; i < (r + 1) * row; ++i)
                queries[i] = to_bits(factor * from_bits(queries[i], dtype), dtype);
        }
    }
    Mirror<uint16_t> q(queries), kv(keys), out(nans(total_q * heads * kVDim, dtype));
    Mirror<uint8_t> fp8(codes);
    Mirror<float> lse(std::vector<float>(total_q * heads, NAN));
    Mirror<int32_t> page_table(table), seq_lens(lengths), cu_seqlens(offsets);

    LatentAttentionArgs args;
    args.softmax_scale = 1.0 / std::sqrt(192.0);
    args.causal = !random.one_in(4);
    if (is_fp8) args.kv_scale = 0.5f;
    if (is_packed && (random.one_in(2) || has_bound)) {
        args.max_seqlen_q = 0;
        for (const Sequence& sequence : sequences)
            args.max_seqlen_q = std::max<int64_t>(*args.max_seqlen_q, sequence.queries);
    }
    auto run = [&](auto view) {
        args.q = view(q, dtype, {total_q, heads, row});
        args.kv_pages = is_fp8 ? view(fp8, DType::float8_e4m3fn, {num_pages, page_size, row})
                               : view(kv, dtype, {num_pages, page_size, row});
        args.q.shape[2] = args.kv_pages.shape[2] = kQkDim;
        args.page_table = view(page_table, DType::int32, {batch, max_pages});
        args.seq_lens = view(seq_lens, DType::int32, {batch});
        if (is_packed) args.cu_seqlens_q = view(cu_seqlens, DType::int32, {batch + 1});
        args.out = view(out, dtype, {total_q, heads, kVDim});
        args.lse = view(lse, DType::float32, {total_q, heads});
        latent_attention(args);
    };
    run(kOnHost);
    for (const std::optional<int64_t> splits : all_splits) {
        args.num_splits = splits;
        out.upload(nans(out.host.size(), dtype));
        lse.upload(std::vector<float>(lse.host.size(), NAN));
        run(kOnGpu);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        expect_close(out.fetch(), out.host, dtype);
        expect_close(lse.fetch(), lse.host);
    }
}

class CudaLatentAttentionTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(CudaLatentAttentionTest, AgreesWithTheCpu) {
    Random random(GetParam());
    const bool is_packed = random.one_in(2);
    std::vector<Sequence> sequences(random.pick({1, 2, 5}));
    for (Sequence& sequence : sequences) {
        sequence.queries = is_packed ? random.pick({&sequence == &sequences[0] ? 3 : 0, 1, 2, 9}) : 1;
        sequence.keys = random.one_in(8) ? 0 : sequence.queries + random.pick({0, 1, 62, 64, 130, 900});
    }
    agrees_with_the_cpu(random, sequences, random.pick({1, 5, 16, 24, 128}), {std::nullopt, 1, 2, 3, 40});
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaLatentAttentionTest, ::testing::Range(0u, 60u));

// Many sequences, which Hopper shares out by their lengths: sequences that many CTAs read, CTAs that read
// many sequences, and batches that are all alike. Sequences have up to `max_queries` queries.
void batch_agrees_with_the_cpu(Random& random, int64_t batch, int64_t heads, int32_t max_queries) {
    const bool is_packed = max_queries > 1 && random.one_in(2), is_uniform = random.one_in(4);
    std::vector<Sequence> sequences(batch);
    const int32_t length = random.pick({1, 31, 128, 200, 1000});
    for (Sequence& sequence : sequences) {
        const bool is_first = &sequence == &sequences[0];
        sequence.queries = is_packed ? random.pick({is_first ? 1 : 0, 1, 2, max_queries}) : 1;
        sequence.keys =
            random.one_in(20) ? 0 : std::max(sequence.queries, random.pick({1, 30, 64, 100, 300}));
        if (batch > 300) sequence.keys = std::min(sequence.keys, 64);
        if (is_uniform) sequence = {1, batch > 300 ? 31 : length};
    }
    if (!is_uniform && random.one_in(2)) sequences[batch / 2] = {1, random.pick({1000, 6000})};
    agrees_with_the_cpu(random, sequences, heads, {std::nullopt});
}

class CudaLatentDecodeTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(CudaLatentDecodeTest, AgreesWithTheCpu) {
    Random random(GetParam());
    const int64_t heads = random.pick({1, 4, 8, 16});
    const int64_t batch =
        is_small_scale() ? random.pick({16, 20, 33}) : random.pick({16, 40, 70, 132, 140, 300, 390, 800});
    batch_agrees_with_the_cpu(random, batch, heads, static_cast<int32_t>(16 / heads));
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaLatentDecodeTest, ::testing::Range(0u, 50u));

// More rows of a sequence than latent_decode takes, in up to ten tiles, the first of which see fewer keys.
// Some sequences have fewer queries than the rest; or all are alike, and have one.
class CudaLatentScheduleTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(CudaLatentScheduleTest, AgreesWithTheCpu) {
    Random random(GetParam());
    const int64_t batch =
        is_small_scale() ? random.pick({16, 20, 33}) : random.pick({16, 40, 70, 132, 140, 390});
    const int32_t max_queries = random.pick({1, 1, 2, 5});
    std::vector<Sequence> sequences(batch);
    for (Sequence& sequence : sequences) {
        sequence.queries = random.one_in(16) ? random.pick({0, 1}) : max_queries;
        sequence.keys =
            random.one_in(20) ? 0 : std::max(sequence.queries, random.pick({1, 30, 64, 66, 100, 130, 300}));
    }
    sequences[0] = {max_queries, random.pick({300, 1000, 6000})};
    if (random.one_in(4)) sequences.assign(std::min<int64_t>(batch, 70), {1, random.pick({60, 500})});
    agrees_with_the_cpu(random, sequences, random.pick({17, 24, 64, 128}), {std::nullopt}, true);
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaLatentScheduleTest, ::testing::Range(0u, 50u));

// Whether sequences of a negative length get what those of length 0 get, and no other sequence anything else.
void negative_lengths_count_as_none(int64_t batch, int64_t heads) {
    const DType dtype = DType::bfloat16;
    const int64_t page_size = 64, max_pages = 8, num_pages = batch * max_pages;
    Random random(9);
    std::vector<int32_t> table(num_pages), lengths(batch, 300);
    std::iota(table.begin(), table.end(), 0);
    lengths[0] = lengths[1] = lengths[batch - 1] = 0;
    std::vector<int32_t> negative = lengths;
    negative[0] = -1, negative[1] = -200, negative[batch - 1] = INT32_MIN;
    Mirror<uint16_t> q(random.normal(batch * heads * kQkDim, dtype));
    Mirror<uint16_t> kv(random.normal(num_pages * page_size * kQkDim, dtype));
    Mirror<uint8_t> codes(std::vector<uint8_t>(kv.host.size(), 0x38));  // ones
    Mirror<uint16_t> out(nans(batch * heads * kVDim, dtype));
    Mirror<float> lse(std::vector<float>(batch * heads, NAN));
    Mirror<int32_t> page_table(table), seq_lens(lengths);
    LatentAttentionArgs args;
    args.softmax_scale = 0.07;
    args.q = q.on_gpu(dtype, {batch, heads, kQkDim});
    args.page_table = page_table.on_gpu(DType::int32, {batch, max_pages});
    args.seq_lens = seq_lens.on_gpu(DType::int32, {batch});
    args.out = out.on_gpu(dtype, {batch, heads, kVDim});
    args.lse = lse.on_gpu(DType::float32, {batch, heads});
    auto run = [&](const std::vector<int32_t>& lengths) {
        seq_lens.upload(lengths);
        out.upload(nans(out.host.size(), dtype));
        lse.upload(std::vector<float>(lse.host.size(), NAN));
        latent_attention(args);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    };
    const std::vector<std::optional<int64_t>> all_splits = {std::nullopt, 1, 3};
    for (int i = 0; i < 12; ++i) {
        args.causal = i % 2 == 0;
        args.num_splits = all_splits[i / 4];
        args.kv_pages = i % 4 < 2 ? kv.on_gpu(dtype, {num_pages, page_size, kQkDim})
                                  : codes.on_gpu(DType::float8_e4m3fn, {num_pages, page_size, kQkDim});
        run(lengths);
        const auto expected = out.fetch();
        const auto expected_lse = lse.fetch();
        for (int64_t b : {int64_t{0}, int64_t{1}, batch - 1}) {
            EXPECT_EQ(from_bits(expected[b * heads * kVDim], dtype), 0.0f);
            EXPECT_EQ(expected_lse[b * heads], -INFINITY);
        }
        run(negative);
        EXPECT_EQ(out.fetch(), expected);
        EXPECT_EQ(lse.fetch(), expected_lse);
    }
}

// On a GPU lengths are not checked, and the documentation gives negative ones no meaning. A call has to end
// all the same, by splits and by a schedule.
TEST(CudaLatentAttention, NegativeLengthsCountAsNone) {
    for (const int64_t batch : {4, 40}) {
        for (const int64_t heads : {16, 128}) negative_lengths_count_as_none(batch, heads);
    }
}

// Calls one behind the other, which programmatic dependent launch lets overlap, share their workspace.
TEST(CudaLatentAttention, CallsInARowKeepApart) {
    const DType dtype = DType::bfloat16;
    const int64_t batch = 4, heads = 16, page_size = 64, max_pages = 32;
    Random random(7);
    std::vector<int32_t> table(batch * max_pages), lengths(batch, page_size * max_pages);
    std::iota(table.begin(), table.end(), 0);
    Mirror<uint16_t> kv(random.normal(batch * max_pages * page_size * kQkDim, dtype));
    Mirror<int32_t> page_table(table), seq_lens(lengths);
    std::deque<Mirror<uint16_t>> q, out;
    for (int i = 0; i < 8; ++i) {
        q.emplace_back(random.normal(batch * heads * kQkDim, dtype));
        out.emplace_back(nans(batch * heads * kVDim, dtype));
    }
    auto run = [&](int i) {
        LatentAttentionArgs args;
        args.softmax_scale = 0.07;
        args.num_splits = 2 + i;
        args.q = q[i].on_gpu(dtype, {batch, heads, kQkDim});
        args.kv_pages = kv.on_gpu(dtype, {batch * max_pages, page_size, kQkDim});
        args.page_table = page_table.on_gpu(DType::int32, {batch, max_pages});
        args.seq_lens = seq_lens.on_gpu(DType::int32, {batch});
        args.out = out[i].on_gpu(dtype, {batch, heads, kVDim});
        latent_attention(args);
    };
    std::vector<std::vector<uint16_t>> alone;
    for (int i = 0; i < 8; ++i) {
        run(i);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        alone.push_back(out[i].fetch());
        out[i].upload(nans(out[i].host.size(), dtype));
    }
    for (int i = 0; i < 8; ++i) run(i);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (int i = 0; i < 8; ++i) EXPECT_EQ(out[i].fetch(), alone[i]) << "call " << i;
}

// Both kernels with a schedule, one behind the other, each with partial results of its own.
TEST(CudaLatentAttention, SchedulesInARowKeepApart) {
    const DType dtype = DType::bfloat16;
    const int64_t batch = 40, page_size = 64, max_pages = 20, num_pages = batch * max_pages / 2;
    Random random(8);
    std::vector<int32_t> table(batch * max_pages), lengths(batch);
    for (int32_t& page : table) page = static_cast<int32_t>(random.engine()() % num_pages);
    for (int32_t& length : lengths)
        length = 1 + static_cast<int32_t>(random.engine()() % (page_size * max_pages));
    Mirror<uint16_t> kv(random.normal(num_pages * page_size * kQkDim, dtype));
    Mirror<int32_t> page_table(table), seq_lens(lengths);
    const std::vector<int64_t> heads = {16, 128, 16, 16, 128, 128, 24, 16, 128};
    std::deque<Mirror<uint16_t>> q, out;
    for (int64_t count : heads) {
        q.emplace_back(random.normal(batch * count * kQkDim, dtype));
        out.emplace_back(nans(batch * count * kVDim, dtype));
    }
    auto run = [&](size_t i) {
        LatentAttentionArgs args;
        args.softmax_scale = 0.07;
        args.q = q[i].on_gpu(dtype, {batch, heads[i], kQkDim});
        args.kv_pages = kv.on_gpu(dtype, {num_pages, page_size, kQkDim});
        args.page_table = page_table.on_gpu(DType::int32, {batch, max_pages});
        args.seq_lens = seq_lens.on_gpu(DType::int32, {batch});
        args.out = out[i].on_gpu(dtype, {batch, heads[i], kVDim});
        latent_attention(args);
    };
    std::vector<std::vector<uint16_t>> alone;
    for (size_t i = 0; i < heads.size(); ++i) {
        run(i);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        alone.push_back(out[i].fetch());
        out[i].upload(nans(out[i].host.size(), dtype));
    }
    for (size_t i = 0; i < heads.size(); ++i) run(i);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (size_t i = 0; i < heads.size(); ++i) EXPECT_EQ(out[i].fetch(), alone[i]) << "call " << i;
}

}  // namespace
}  // namespace octavo
