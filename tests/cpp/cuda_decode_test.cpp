// Decoding on CUDA against the CPU: batches whose work is shared out in every way that the kernel knows.
#include "cuda_testing.h"

#include <octavo/paged_attention.h>

#include <set>
#include <string>

namespace octavo {
namespace {

struct DecodeCase {
    std::string name;
    std::vector<int32_t> lengths;
    int64_t num_kv_heads, group_size;
    int32_t seqlen_q = 1;
    int64_t window_left = -1, page_size = 0;  // 0: several
};

std::vector<int32_t> alike(size_t batch, int32_t length) { return std::vector<int32_t>(batch, length); }

std::vector<int32_t> short_lengths(size_t batch) {
    std::vector<int32_t> lengths(batch);
    for (size_t i = 0; i < batch; ++i) lengths[i] = static_cast<int32_t>(i * 37 % 257);
    return lengths;
}

std::vector<int32_t> ragged(int32_t batch, int32_t longest) {
    std::vector<int32_t> lengths(batch);
    for (int32_t i = 0; i < batch; ++i) lengths[i] = i * i * 389 % (longest + 1);
    return lengths;
}

// Of 1 to 40 keys, but for one in ten.
std::vector<int32_t> short_among_long(int32_t batch, int32_t longest) {
    std::vector<int32_t> lengths(batch);
    for (int32_t i = 0; i < batch; ++i) lengths[i] = i % 10 == 5 ? longest - 37 * i : 1 + i * 17 % 40;
    return lengths;
}

// Of the cases below those that stream_k_decode serves on 132 SMs, if they have no window.
const std::set<std::string> kStreamKCases{
    "an_item_a_cta",
    "few_short_among_long",
    "items_cut_by_runs",
    "many_kv_heads",
    "many_kv_heads_one_sequence",
    "many_units_ragged",
    "many_units_ragged_one_head",
    "more_than_a_launch",
    "parts_of_items",
    "ragged_items_of_several_units",
    "ragged_on_odd_pages",
    "short_among_long",
    "thirty_three_ragged",
    "three_items_of_units_a_cta",
    "two_units_an_item",
    "units_of_sixteen_rows",
};

void expect_kind(const PagedAttentionArgs& args, const DecodeCase& c) {
    const int64_t head_dim = args.q.shape[2];
    if (c.group_size * c.seqlen_q > (head_dim <= 128 ? 16 : 8)) return;  // too many rows for any of them
    if (args.batch_invariant) {
        EXPECT_EQ(kind_of(args), args.window_left < 0 ? "split_kv_decode" : "batch_invariant_decode");
    } else if (args.window_left >= 0) {
        EXPECT_EQ(kind_of(args), "stream_k_decode");
    } else if (num_sms() == 132) {
        const bool is_stream_k = kStreamKCases.count(c.name) > 0;
        EXPECT_EQ(kind_of(args), is_stream_k ? "stream_k_decode" : "split_kv_decode");
    }
}

class CudaDecodeTest : public ::testing::TestWithParam<DecodeCase> {
  protected:
    void run(bool batch_invariant);
};

void CudaDecodeTest::run(bool batch_invariant) {
    const DecodeCase& c = GetParam();
    constexpr int64_t kPageSizes[] = {1, 16, 24, 64, 5};
    unsigned seed = c.lengths.size();
    for (const int64_t head_dim : {64, 80, 128, 192, 256}) {
        if (c.page_size > 0 && head_dim > 80) break;
        const int64_t page_size = c.page_size > 0 ? c.page_size : kPageSizes[seed % 5];
        Random random(seed++);
        const DType dtype = random.pick({DType::float16, DType::bfloat16});
        Cache cache(random, c.lengths, page_size, c.num_kv_heads, head_dim, dtype);
        const int64_t batch = c.lengths.size(), num_q_heads = c.num_kv_heads * c.group_size;
        const int64_t total_q = batch * c.seqlen_q;
        Mirror<int32_t> cu_seqlens_q(cumulative(std::vector<int32_t>(batch, c.seqlen_q)));
        Mirror<int32_t> table(cache.table), lengths(cache.lengths);
        Mirror<uint16_t> q(random.normal(total_q * num_q_heads * head_dim, dtype)), k(cache.k), v(cache.v);
        Mirror<uint16_t> out(nans(q.host.size(), dtype));
        Mirror<float> lse(std::vector<float>(total_q * num_q_heads, NAN)), slopes(slopes_for(num_q_heads));

        PagedAttentionArgs args;
        args.batch_invariant = batch_invariant;
        if (random.one_in(3)) args.window_left = random.pick({0, 10, 90, 300});
        if (c.window_left >= 0) args.window_left = c.window_left;
        if (random.one_in(4)) args.softcap = 20.0;
        const bool with_alibi = random.one_in(3);
        auto set = [&](auto view) {
            args.q = view(q, dtype, {total_q, num_q_heads, head_dim});
            args.out = view(out, dtype, {total_q, num_q_heads, head_dim});
            args.lse = view(lse, DType::float32, {total_q, num_q_heads});
            args.k_pages = view(k, dtype, {cache.num_pages, page_size, c.num_kv_heads, head_dim});
            args.v_pages = view(v, dtype, {cache.num_pages, page_size, c.num_kv_heads, head_dim});
            args.page_table = view(table, DType::int32, {batch, cache.max_pages});
            args.seq_lens = view(lengths, DType::int32, {batch});
            if (c.seqlen_q > 1) {
                args.cu_seqlens_q = view(cu_seqlens_q, DType::int32, {batch + 1});
                args.max_seqlen_q = c.seqlen_q;
            }
            if (with_alibi) args.alibi_slopes = view(slopes, DType::float32, {num_q_heads});
        };
        using Shape = std::initializer_list<int64_t>;
        auto on_gpu = [](auto& mirror, DType dtype, Shape shape) { return mirror.on_gpu(dtype, shape); };
        set(on_gpu);
        expect_kind(args, c);
        paged_attention(args);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const std::vector<uint16_t> first_bits = out.fetch();
        paged_attention(args);  // meets what the first launch left behind
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        SCOPED_TRACE("head_dim " + std::to_string(head_dim) + ", page_size " + std::to_string(page_size));
        const std::vector<uint16_t> out_bits = out.fetch();
        const std::vector<float> lse_values = lse.fetch();
        ASSERT_EQ(first_bits, out_bits) << "from call to call";
        if (batch_invariant && args.window_left < 0) {  // a window makes runs of units of the same work
            out.upload(nans(q.host.size(), dtype));
            lse.upload(std::vector<float>(total_q * num_q_heads, NAN));
            args.window_left = 1 << 20;
            expect_kind(args, c);
            paged_attention(args);
            args.window_left = -1;
            ASSERT_EQ(out.fetch(), out_bits) << "with a window that hides nothing";
            ASSERT_EQ(lse.fetch(), lse_values) << "with a window that hides nothing";
        }
        if (batch_invariant) {
            const int64_t rows = c.seqlen_q * num_q_heads;
            Mirror<uint16_t> own_out(nans(rows * head_dim, dtype));
            Mirror<float> own_lse(std::vector<float>(rows, NAN));
            for (int64_t b = 0; b < batch; b += 1 + batch / 16) {
                PagedAttentionArgs own = alone(args, b, b * c.seqlen_q, c.seqlen_q);
                own.out = own_out.on_gpu(dtype, {c.seqlen_q, num_q_heads, head_dim});
                own.lse = own_lse.on_gpu(DType::float32, {c.seqlen_q, num_q_heads});
                // Nor does the room in its table matter.
                if (b % 2 == 1)
                    own.page_table.shape[1] =
                        std::max<int64_t>(1, (c.lengths[b] + page_size - 1) / page_size);
                paged_attention(own);
                const auto own_bits = own_out.fetch();
                const auto in_batch = out_bits.begin() + b * rows * head_dim;
                ASSERT_TRUE(std::equal(own_bits.begin(), own_bits.end(), in_batch))
                    << "sequence " << b << ", first at "
                    << std::mismatch(own_bits.begin(), own_bits.end(), in_batch).first - own_bits.begin();
                const auto own_values = own_lse.fetch();
                ASSERT_TRUE(std::equal(own_values.begin(), own_values.end(), lse_values.begin() + b * rows))
                    << "sequence " << b;
            }
        }
        set([](auto& mirror, DType dtype, Shape shape) { return mirror.on_host(dtype, shape); });
        paged_attention(args);
        expect_close(out_bits, out.host, dtype);
        expect_close(lse_values, lse.host);
    }
}

TEST_P(CudaDecodeTest, AgreesWithTheCpu) { run(false); }

// And every sequence alone has the bits that it has in the batch.
TEST_P(CudaDecodeTest, BatchInvariant) { run(true); }

INSTANTIATE_TEST_SUITE_P(
    Cases, CudaDecodeTest,
    ::testing::Values(
        DecodeCase{"one_short", {17}, 2, 4}, DecodeCase{"one_long", {5003}, 1, 8},
        DecodeCase{"many_parts", {9001}, 2, 1}, DecodeCase{"pairs", alike(3, 600), 16, 1},
        DecodeCase{"pairs_of_many_rows", alike(2, 700), 22, 3, 2},
        DecodeCase{"an_item_a_cta", alike(20, 100), 5, 2}, DecodeCase{"whole_items", alike(67, 40), 4, 7},
        DecodeCase{"items_cut_by_runs", alike(70, 300), 2, 2},
        DecodeCase{"ragged", {1, 2000, 0, 17, 333, 16, 1024, 5}, 3, 4},
        DecodeCase{"ragged_one_head", {700, 3, 0, 0, 1500, 2, 31, 999, 64, 65}, 1, 16},
        // The window's last keys lie in a page whose id was fetched for the next block, which never comes.
        DecodeCase{"windows_off_the_pages", alike(132, 176), 9, 1, 1, 150, 5},
        DecodeCase{"ragged_on_odd_pages", {1600, 1609, 3, 1601, 1595, 1600, 40, 1603}, 30, 1, 1, -1, 12},
        DecodeCase{"many_sequences", alike(300, 9), 1, 5},
        DecodeCase{"more_than_a_launch", alike(1030, 3), 1, 2},
        DecodeCase{"many_short", alike(150, 120), 8, 4},
        DecodeCase{"many_short_ragged", short_lengths(180), 7, 1},
        DecodeCase{"units_of_long_items", {20000, 300, 7000}, 2, 4},
        // Batch-invariant: CTAs of several units of an item, of several items, items of several parts.
        DecodeCase{"two_ctas_an_item", alike(8, 1300), 8, 4},
        DecodeCase{"five_ctas_an_item", alike(3, 1501), 8, 2},
        DecodeCase{"many_units_ragged", ragged(45, 1500), 4, 3},
        DecodeCase{"many_units_ragged_one_head", ragged(140, 2500), 1, 8, 1, -1, 16},
        DecodeCase{"two_units_an_item", alike(34, 600), 8, 1, 1, -1, 16},
        DecodeCase{"parts_of_items", alike(132, 4200), 1, 2, 1, -1, 16},
        DecodeCase{
            "ragged_items_of_several_units", {900, 130, 260, 390, 40, 520, 1040, 129, 128, 127}, 16, 1},
        DecodeCase{"units_of_sixteen_rows", alike(18, 530), 8, 4, 4, -1, 16},
        DecodeCase{"parts_of_sixteen_rows", {4100, 300, 5000}, 2, 8, 2, -1, 16},
        DecodeCase{"three_items_of_units_a_cta", alike(50, 1040), 8, 4, 4, -1, 16},
        DecodeCase{"ragged_sixteen_rows", {513, 65, 1100, 64, 300, 777}, 8, 2, 8},
        DecodeCase{"short_among_long", short_among_long(64, 3000), 2, 4},
        DecodeCase{"few_short_among_long", short_among_long(15, 1500), 8, 1},
        DecodeCase{"sixteen_rows_short_among_long", short_among_long(12, 2500), 2, 4, 4},
        // More KV heads than an item of several units may have CTAs, and than SMs.
        DecodeCase{"many_kv_heads_one_sequence", {300}, 140, 1},
        DecodeCase{"many_kv_heads", {200, 90}, 130, 1},
        DecodeCase{"many_kv_heads_of_groups", {40, 133, 90}, 160, 3},
        // A warp knows the lengths of 32 sequences.
        DecodeCase{"thirty_two_ragged", ragged(32, 700), 2, 4},
        DecodeCase{"thirty_three_ragged", ragged(33, 700), 2, 4},
        DecodeCase{"thirty_three_ragged_sixteen_rows", ragged(33, 500), 1, 4, 3},
        DecodeCase{"sixteen_rows", {300, 40, 1200}, 2, 4, 4},
        DecodeCase{"thirty_two_rows", {260, 1000, 90}, 2, 4, 8}, DecodeCase{"twenty_rows", {500, 31}, 1, 20}),
    [](const auto& info) { return info.param.name; });

// Scores, in units of log2(e), at bounds that a kernel may set for maxima, and far beyond: zero may stand for
// one that is within [-2, 8].
class CudaDecodeScoresTest : public ::testing::TestWithParam<unsigned> {
  protected:
    static std::vector<int32_t> some_lengths(Random& random) {
        return random.pick<std::vector<int32_t>>(
            {{1500}, {1, 17, 300, 2049, 40, 700, 16, 33}, ragged(40, 130)});
    }

    // Each block of 16 keys has one of these, but for 0.4 at most; or one of its keys has, and the others
    // count next to nothing.
    float next_level() {
        static const std::vector<float> levels[] = {{-2}, {8}, {-2, 8}, {-12, -2, 0, 8, 17}};
        const std::vector<float>& mine = levels[GetParam() % 4];
        return mine[random_.engine()() % mine.size()] +
               std::uniform_real_distribution(-0.4f, 0.4f)(random_.engine());
    }
    const bool one_key_counts_ = GetParam() / 4 % 2 == 1;
    // Every second head sees them turned round: 8 as -2.
    const bool turned_ = GetParam() / 8 % 2 == 1;

    Random random_{GetParam()};
    const DType dtype_ = random_.pick({DType::float16, DType::bfloat16});
    const int64_t head_dim_ = random_.pick({64, 96, 128, 128, 256});
    const int64_t num_kv_heads_ = random_.pick({1, 2, 5}),
                  num_q_heads_ = num_kv_heads_ * random_.pick({1, 4, 8});
    const int32_t seqlen_q_ = random_.pick({1, 1, 2});
};

TEST_P(CudaDecodeScoresTest, AloneAndInABatch) {
    Cache cache(random_, some_lengths(random_), random_.pick({1, 16, 24}), num_kv_heads_, head_dim_, dtype_);
    std::vector<float> direction(head_dim_);
    for (float& x : direction) x = random_.pick({-1.0f, 1.0f});
    const float key_of_score = std::log(2.0f) / std::sqrt(static_cast<float>(head_dim_));
    std::normal_distribution<float> noise(0.0f, 0.05f);
    for (int64_t b = 0; b < cache.batch; ++b) {
        float level = 0.0f;
        for (int32_t position = 0; position < cache.lengths[b]; ++position) {
            if (position % 16 == 0) level = next_level();
            const float score = one_key_counts_ && (position % 16 != b % 16) ? -30.0f : level;
            const int64_t page = cache.table[b * cache.max_pages + position / cache.page_size];
            const auto key = cache.k.begin() + (page * cache.page_size + position % cache.page_size) *
                                                   num_kv_heads_ * head_dim_;
            for (int64_t i = 0; i < num_kv_heads_ * head_dim_; ++i) {
                key[i] = to_bits(score * key_of_score * direction[i % head_dim_] + noise(random_.engine()),
                                 dtype_);
            }
        }
    }
    PagedCall call(random_, cache, std::vector<int32_t>(cache.batch, seqlen_q_), num_q_heads_, dtype_);
    for (size_t i = 0; i < call.q.host.size(); ++i) {
        const float factor = turned_ && i / head_dim_ % 2 == 1 ? -0.25f : 1.0f;
        call.q.host[i] = to_bits(factor * direction[i % head_dim_], dtype_);
    }
    call.q.upload(call.q.host);
    call.packed = seqlen_q_ > 1;
    if (call.packed) call.options.max_seqlen_q = seqlen_q_;
    call.run_on_gpu();
    call.expect_what_the_cpu_gives();

    call.options.batch_invariant = true;
    EXPECT_EQ(kind_of(call.arguments(kOnGpu)), "split_kv_decode");
    call.run_on_gpu();
    call.expect_what_the_cpu_gives();
    const auto out = call.out.fetch();
    const auto lse = call.lse.fetch();
    call.options.window_left = 1 << 20;  // which hides nothing, but makes runs of units of the same work
    EXPECT_EQ(kind_of(call.arguments(kOnGpu)), "batch_invariant_decode");
    call.run_on_gpu();
    ASSERT_EQ(call.out.fetch(), out);
    ASSERT_EQ(call.lse.fetch(), lse);
    call.options.window_left = -1;
    const int64_t rows = seqlen_q_ * num_q_heads_;
    Mirror<uint16_t> own_out(nans(rows * head_dim_, dtype_));
    Mirror<float> own_lse(std::vector<float>(rows, NAN));
    for (int64_t b = 0; b < cache.batch; ++b) {
        PagedAttentionArgs own = alone(call.arguments(kOnGpu), b, b * seqlen_q_, seqlen_q_);
        own.out = own_out.on_gpu(dtype_, {seqlen_q_, num_q_heads_, head_dim_});
        own.lse = own_lse.on_gpu(DType::float32, {seqlen_q_, num_q_heads_});
        paged_attention(own);
        const auto own_bits = own_out.fetch();
        const auto own_values = own_lse.fetch();
        ASSERT_TRUE(std::equal(own_bits.begin(), own_bits.end(), out.begin() + b * rows * head_dim_))
            << "sequence " << b;
        ASSERT_TRUE(std::equal(own_values.begin(), own_values.end(), lse.begin() + b * rows))
            << "sequence " << b;
    }
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaDecodeScoresTest, ::testing::Range(0u, 64u));

}  // namespace
}  // namespace octavo
