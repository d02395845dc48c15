// Decoding on CUDA against the CPU: batches whose work is shared out in every way that the kernels know.
#include "paged_call.h"

#include <octavo/paged_attention.h>

#include <functional>
#include <ostream>
#include <string>

namespace octavo {
namespace {

struct DecodeCase {
    std::string name;
    // What serves it on 132 SMs, without masks and with head dims up to 128: "stream_k", or a policy of
    // split_kv_decode; empty: it depends on the head dim, or no decode kernel does.
    std::string policy;
    std::vector<int32_t> lengths;
    int64_t num_kv_heads, group_size;
    int32_t seqlen_q = 1;
    int64_t window_left = -1, page_size = 0;  // 0: several
    int64_t room = 0;                         // keys that the page table has room for, at least
};

// What googletest calls a case.
void PrintTo(const DecodeCase& c, std::ostream* out) { *out << c.name; }

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

// Lengths of 1 to 40 keys, but for one in ten.
std::vector<int32_t> short_among_long(int32_t batch, int32_t longest) {
    std::vector<int32_t> lengths(batch);
    for (int32_t i = 0; i < batch; ++i) lengths[i] = i % 10 == 5 ? longest - 37 * i : 1 + i * 17 % 40;
    return lengths;
}

// On a small scale as small a part of the case. It has the room of the whole, which policies ask for; but few
// items are shared out by length, and they must not be long.
DecodeCase scaled(DecodeCase c) {
    if (!is_small_scale()) return c;
    const int32_t longest = *std::max_element(c.lengths.begin(), c.lengths.end());
    // Splits of one size are long.
    c.lengths = scaled_batch(c.lengths, c.num_kv_heads, c.policy == "sized" ? 1100 : kManyKeys);
    c.num_kv_heads = scaled_heads(c.num_kv_heads);
    if (c.policy == "by_length")
        c.num_kv_heads = 1;
    else
        c.room = std::max<int64_t>(c.room, longest);
    return c;
}

class CudaDecodeTest : public ::testing::TestWithParam<DecodeCase> {
  protected:
    // `body(random, call)` for each head dim, on a small scale for one, which the case's name picks.
    template <class Body>
    void for_each_call(Body body);

    // Whether its rows are few enough for the decode kernels.
    static bool has_few_rows(int64_t head_dim) {
        const DecodeCase& c = GetParam();
        return c.group_size * c.seqlen_q <= (head_dim <= 128 ? 16 : 8);
    }
};

template <class Body>
void CudaDecodeTest::for_each_call(Body body) {
    const DecodeCase c = scaled(GetParam());
    constexpr int64_t kPageSizes[] = {1, 16, 24, 64, 5};
    const std::vector<int64_t> head_dims = c.page_size > 0
                                               ? std::vector<int64_t>{64, 80}
                                               : std::vector<int64_t>{64, 80, 128, 192, 256, 320, 512};
    size_t first = 0, end = head_dims.size();
    if (is_small_scale()) {
        // The larger ones less often.
        constexpr size_t kFirst[] = {0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 6};
        first = std::min(kFirst[std::hash<std::string>{}(c.name) % std::size(kFirst)], end - 1);
        end = first + 1;
    }
    for (size_t i = first; i < end; ++i) {
        const int64_t head_dim = head_dims[i];
        const unsigned seed = static_cast<unsigned>(GetParam().lengths.size() + i);
        const int64_t page_size = c.page_size > 0 ? c.page_size : kPageSizes[seed % 5];
        Random random(seed);
        const DType dtype = random.pick({DType::float16, DType::bfloat16});
        Cache cache(random, at_least(c.lengths, c.seqlen_q), page_size, c.num_kv_heads, head_dim, dtype);
        cache.widen(std::max(cache.max_pages, c.room / page_size));
        PagedCall call(random, cache, c.seqlen_q, c.num_kv_heads * c.group_size, dtype);
        if (random.one_in(3)) call.options.window_left = random.pick({0, 10, 90, 300});
        if (c.window_left >= 0) call.options.window_left = c.window_left;
        if (random.one_in(4)) call.options.softcap = 20.0;
        call.with_alibi = random.one_in(3);
        if (c.seqlen_q > 1 && random.one_in(2)) {
            call.options.causal = false;
            call.options.window_right = random.pick({0, 1, 2});
        }
        body(random, call);
        if (HasFatalFailure()) return;
    }
}

TEST_P(CudaDecodeTest, AgreesWithTheCpu) {
    for_each_call([](Random& random, PagedCall& call) {
        const bool means_a_policy = call.head_dim <= 128 && (num_sms() == 132 || is_small_scale()) &&
                                    !GetParam().policy.empty() &&
                                    call.options.window_left == GetParam().window_left;
        if (means_a_policy) {
            EXPECT_EQ(decode_policy(call), GetParam().policy) << call.name();
        }
        if (!has_few_rows(call.head_dim)) {
            call.run_on_cpu();
            call.expect_right(paged_attention);
            return;
        }
        expect_every_decode_right(call);
        if (HasFatalFailure()) return;
        call.pick_prefix_lens(random);
        call.options.window_left = random.pick({-1, 0, 10, 90, 300});
        expect_every_decode_right(call);
        if (HasFatalFailure() || call.packed || (is_small_scale() && random.one_in(2))) return;
        call.options.window_left = random.pick({-1, -1, 40});
        call.options.attention_chunk = random.pick({1, 7, 64, 500});
        expect_every_decode_right(call);
        if (HasFatalFailure()) return;
        call.prefix_lens.reset();
        expect_every_decode_right(call);
    });
}

// The bits of no window, with one that hides nothing.
void expect_the_same_behind_a_wide_window(PagedCall& call) {
    call.options.window_left = -1;
    call.run_on_gpu();
    const PagedCall::Results without = call.fetch();
    call.options.window_left = 1 << 20;
    call.run_on_gpu();
    ASSERT_TRUE(call.fetch() == without) << call.name();
}

// Every sequence alone has the bits that it has in the batch, whatever it sees.
TEST_P(CudaDecodeTest, BatchInvariant) {
    for_each_call([](Random& random, PagedCall& call) {
        call.options.batch_invariant = true;
        const int64_t own_window = call.options.window_left;
        for (const bool with_prefix : {false, true}) {
            if (with_prefix && (!has_few_rows(call.head_dim) || (is_small_scale() && random.one_in(2))))
                break;
            if (with_prefix) call.pick_prefix_lens(random);
            expect_the_same_behind_a_wide_window(call);
            if (HasFatalFailure()) return;
            std::vector<int64_t> windows{-1, 0, 10, 90, 300, own_window};
            if (is_small_scale()) windows = {-1, 90};
            for (const int64_t window_left : windows) {
                call.options.window_left = window_left;
                if (has_few_rows(call.head_dim)) {
                    EXPECT_EQ(decode_policy(call), "fixed") << call.name();
                }
                call.expect_the_same_alone(1 + call.batch / (is_small_scale() ? 3 : 16));
                if (HasFatalFailure()) return;
            }
        }
        if (has_few_rows(call.head_dim)) return;  // AgreesWithTheCpu has compared it
        call.options.window_left = own_window;
        call.run_on_cpu();
        call.expect_right(paged_attention);
    });
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CudaDecodeTest,
    ::testing::Values(
        DecodeCase{"one_short", "even", {17}, 2, 4}, DecodeCase{"one_long", "even", {5003}, 1, 8},
        DecodeCase{"many_parts", "even", {9001}, 2, 1},
        DecodeCase{"pairs", "by_length", alike(3, 600), 16, 1},
        DecodeCase{"pairs_of_many_rows", "by_length", alike(2, 700), 22, 3, 2},
        DecodeCase{"an_item_a_cta", "even", alike(20, 100), 5, 2},
        DecodeCase{"whole_items", "even", alike(67, 40), 4, 7},
        DecodeCase{"items_cut_by_runs", "even", alike(70, 300), 2, 2},
        DecodeCase{"ragged", "by_length", {1, 2000, 0, 17, 333, 16, 1024, 5}, 3, 4},
        DecodeCase{"ragged_one_head", "by_length", {700, 3, 0, 0, 1500, 2, 31, 999, 64, 65}, 1, 16},
        // The window's last keys lie in a page whose id was fetched for the next block, which never comes.
        DecodeCase{"windows_off_the_pages", "even", alike(132, 176), 9, 1, 1, 150, 5},
        DecodeCase{
            "ragged_on_odd_pages", "even", {1600, 1609, 3, 1601, 1595, 1600, 40, 1603}, 30, 1, 1, -1, 12},
        DecodeCase{"many_sequences", "even", alike(300, 9), 1, 5},
        DecodeCase{"more_than_a_launch", "even", alike(1030, 3), 1, 2},
        DecodeCase{"many_short", "even", alike(150, 120), 8, 4},
        DecodeCase{"many_short_ragged", "even", short_lengths(180), 7, 1},
        DecodeCase{"units_of_long_items", "by_length", {20000, 300, 7000}, 2, 4},
        // CTAs of stream_k_decode that work on several items, and items of several CTAs.
        DecodeCase{"two_ctas_an_item", "by_length", alike(8, 1300), 8, 4},
        DecodeCase{"five_ctas_an_item", "by_length", alike(3, 1501), 8, 2},
        DecodeCase{"many_units_ragged", "", ragged(45, 1500), 4, 3},
        DecodeCase{"many_units_ragged_one_head", "", ragged(140, 2500), 1, 8, 1, -1, 16},
        DecodeCase{"two_units_an_item", "even", alike(34, 600), 8, 1, 1, -1, 16},
        DecodeCase{"parts_of_items", "", alike(132, 4200), 1, 2, 1, -1, 16},
        DecodeCase{"ragged_items_of_several_units",
                   "even",
                   {900, 130, 260, 390, 40, 520, 1040, 129, 128, 127},
                   16,
                   1},
        DecodeCase{"units_of_sixteen_rows", "even", alike(18, 530), 8, 4, 4, -1, 16},
        DecodeCase{"parts_of_sixteen_rows", "by_length", {4100, 300, 5000}, 2, 8, 2, -1, 16},
        DecodeCase{"three_items_of_units_a_cta", "even", alike(50, 1040), 8, 4, 4, -1, 16},
        DecodeCase{"ragged_sixteen_rows", "by_length", {513, 65, 1100, 64, 300, 777}, 8, 2, 8},
        DecodeCase{"short_among_long", "sized", short_among_long(64, 3000), 2, 4},
        DecodeCase{"few_short_among_long", "sized", short_among_long(15, 1500), 8, 1},
        // As many items as SMs, with a CTA each at head dim 128: none is left over, one is, items are brief.
        DecodeCase{"as_many_items_as_ctas", "", ragged(16, 900), 8, 4},
        DecodeCase{"a_cta_left_over", "", short_among_long(31, 1700), 4, 8},
        DecodeCase{"brief_items", "even", ragged(16, 400), 8, 4},
        DecodeCase{"sixteen_rows_short_among_long", "by_length", short_among_long(12, 2500), 2, 4, 4},
        // More KV heads than an item of several units may have CTAs, and than SMs.
        DecodeCase{"many_kv_heads_one_sequence", "even", {300}, 140, 1},
        DecodeCase{"many_kv_heads", "even", {200, 90}, 130, 1},
        DecodeCase{"many_kv_heads_of_groups", "even", {40, 133, 90}, 160, 3},
        // A warp knows the lengths of 32 sequences.
        DecodeCase{"thirty_two_ragged", "by_length", ragged(32, 700), 2, 4},
        DecodeCase{"thirty_three_ragged", "sized", ragged(33, 700), 2, 4},
        DecodeCase{"thirty_three_ragged_sixteen_rows", "sized", ragged(33, 500), 1, 4, 3},
        // Short sequences in a table with room for many splits.
        DecodeCase{"room_for_long_ones", "stream_k", ragged(64, 300), 8, 2, 1, -1, 0, 20000},
        DecodeCase{"room_of_sixteen_rows", "stream_k", ragged(40, 500), 12, 4, 4, -1, 0, 30000},
        DecodeCase{"sixteen_rows", "by_length", {300, 40, 1200}, 2, 4, 4},
        DecodeCase{"thirty_two_rows", "", {260, 1000, 90}, 2, 4, 8},
        DecodeCase{"twenty_rows", "", {500, 31}, 1, 20}),
    [](const auto& info) { return info.param.name; });

// Scores, in units of log2(e), at bounds that a kernel may set for maxima, and far beyond: zero may stand for
// one that is within [-2, 8].
class CudaDecodeScoresTest : public ::testing::TestWithParam<unsigned> {
  protected:
    static std::vector<int32_t> some_lengths(Random& random) {
        return scaled_batch(
            random.pick<std::vector<int32_t>>({{1500}, {1, 17, 300, 2049, 40, 700, 16, 33}, ragged(40, 130)}),
            1, 300);
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
    const int64_t num_kv_heads_ = scaled_heads(random_.pick({1, 2, 5})),
                  num_q_heads_ = num_kv_heads_ * random_.pick({1, 4, 8});
    // No more rows than the decode kernels take.
    const int32_t seqlen_q_ =
        std::min(random_.pick({1, 1, 2}),
                 static_cast<int32_t>((head_dim_ <= 128 ? 16 : 8) * num_kv_heads_ / num_q_heads_));
};

TEST_P(CudaDecodeScoresTest, AloneAndInABatch) {
    const std::vector<int32_t> lengths = at_least(some_lengths(random_), seqlen_q_);
    Cache cache(random_, lengths, random_.pick({1, 16, 24}), num_kv_heads_, head_dim_, dtype_);
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
    PagedCall call(random_, cache, seqlen_q_, num_q_heads_, dtype_);
    for (size_t i = 0; i < call.q.host.size(); ++i) {
        const float factor = turned_ && i / head_dim_ % 2 == 1 ? -0.25f : 1.0f;
        call.q.host[i] = to_bits(factor * direction[i % head_dim_], dtype_);
    }
    call.q.upload(call.q.host);
    for (const bool with_masks : {false, true}) {
        if (with_masks && GetParam() % 2 == 0) break;
        if (with_masks) {
            call.pick_prefix_lens(random_);
            call.options.window_left = random_.pick({-1, 10, 300});
        }
        expect_every_decode_right(call);
        if (HasFatalFailure()) return;
        call.options.batch_invariant = true;
        call.expect_the_same_alone();
        if (HasFatalFailure()) return;
        expect_the_same_behind_a_wide_window(call);
        if (HasFatalFailure()) return;
        call.options.batch_invariant = false;
    }
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaDecodeScoresTest, ::testing::Range(0u, 64u));

}  // namespace
}  // namespace octavo
