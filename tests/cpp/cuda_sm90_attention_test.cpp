// Batches that decode, verify drafts and prefill at once, with row tiles for more than half of the SMs: the
// prefill kernel where there is one, with row tiles of few rows and of many.
#include "paged_call.h"

#include <octavo/paged_attention.h>

namespace octavo {
namespace {

class CudaPrefillTest : public ::testing::TestWithParam<unsigned> {
  protected:
    CudaPrefillTest() {
        pick_masks(random_, call_.options);
        call_.options.max_seqlen_q = random_.pick({230, 257});
        call_.with_alibi = random_.one_in(4) && cache_.page_size % 8 == 0;
    }

    Random random_{GetParam()};
    const DType dtype_ = random_.pick({DType::float16, DType::bfloat16});
    const int64_t num_kv_heads_ = random_.pick({2, 3});
    const int64_t num_q_heads_ = num_kv_heads_ * random_.pick({1, 3, 4, 8});
    const int64_t head_dim_ = random_.pick({64, 96, 128, 128, 128, 120, 192, 256});
    const std::vector<int32_t> lengths_q_ = mixed_lengths_q(random_);
    const std::vector<int32_t> lengths_k_ = longer(random_, lengths_q_);
    Cache cache_{random_, lengths_k_, random_.pick({1, 5, 8, 16, 24, 256}), num_kv_heads_, head_dim_, dtype_};
    PagedCall call_{random_, cache_, lengths_q_, num_q_heads_, dtype_};
};

TEST_P(CudaPrefillTest, AgreesWithTheCpu) {
    if (is_hopper()) {
        EXPECT_EQ(kind_of(call_.explained()), "sm90_attention");
    }
    call_.run_on_gpu();
    call_.expect_what_the_cpu_gives();
}

class CudaPrefillBitsTest : public CudaPrefillTest {};

// Every sequence alone has the bits that it has in the batch.
TEST_P(CudaPrefillBitsTest, BatchInvariant) {
    call_.options.batch_invariant = true;
    call_.expect_the_same_alone(3);
    if (HasFatalFailure()) return;
    call_.run_on_gpu();
    call_.expect_what_the_cpu_gives();
}

// Whether half of the SMs have work once the keys of all row tiles are shared out: sm90_attention refuses
// paged batches otherwise.
bool has_work_for_half_of_the_sms(const PagedCall& call) {
    constexpr int64_t kMostRows = 4 * cuda::kSm90GroupRows;  // of a row tile of one CTA
    const int64_t row_tiles = cuda::ceil_divide(call.total_q() * call.num_q_heads, kMostRows);
    return 2 * row_tiles * cuda::kMaxEvenSm90Splits > num_sms();
}

// On the GPUs whose number of SMs the lengths below have been made for.
void expect_splits(PagedCall& call) {
    if (!is_hopper() || num_sms() != 132) return;
    EXPECT_EQ(kind_of(call.explained()), "sm90_attention");
    EXPECT_EQ(field(call.explained(), "feature"), "splits");
}

// Row tiles for a part of the SMs, which share out their keys.
class CudaPrefillSplitsTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(CudaPrefillSplitsTest, AgreesWithTheCpu) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t head_dim = random.pick({64, 96, 128, 128, 192, 256}),
                  group_size = random.pick({3, 4, 5, 7, 8, 16});
    const int64_t num_kv_heads = group_size == 16 ? 1 : random.pick({1, 2, 3});
    // One sequence at least with row tiles and keys enough to share out, which the others may not have.
    std::vector<int32_t> lengths_q{random.pick({100, 129, 200})};
    std::vector<int32_t> lengths_k{lengths_q[0] + random.pick({1000, 2501, 4000})};
    for (int32_t i = random.pick({0, 0, 1, 3}); i > 0; --i) {
        lengths_q.push_back(random.pick({0, 1, 17, 64, 100, 129, 200}));
        lengths_k.push_back(lengths_q.back() + random.pick({0, 130, 1000, 2501, 4000}));
    }
    Cache cache(random, lengths_k, random.pick({1, 5, 8, 16, 24, 256}), num_kv_heads, head_dim, dtype);
    PagedCall call(random, cache, lengths_q, num_kv_heads * group_size, dtype);
    pick_masks(random, call.options);
    if (call.options.window_left >= 0)
        call.options.window_left += 1200;  // of fewer keys no part would be worth it
    if (call.options.attention_chunk > 0) call.options.attention_chunk += 1200;
    call.options.max_seqlen_q = random.pick({200, 257});
    call.with_lse = !random.one_in(4);
    if (random.one_in(3)) {
        std::vector<int32_t> prefix_lens;
        for (int32_t length : lengths_k) prefix_lens.push_back(random.pick({0, length / 3, length}));
        call.prefix_lens.emplace(prefix_lens);
    }
    // Beside few rows, row tiles of several rounds are not split.
    if (has_work_for_half_of_the_sms(call) && field(call.explained(), "feature") != "few_rows")
        expect_splits(call);
    call.run_on_cpu();
    call.expect_right(paged_attention);
}

void expect_agreement(int64_t head_dim, const std::vector<int32_t>& lengths_q,
                      const std::vector<int32_t>& lengths_k, int64_t num_kv_heads, bool splits = true) {
    Random random(1);
    Cache cache(random, lengths_k, 16, num_kv_heads, head_dim, DType::bfloat16);
    PagedCall call(random, cache, lengths_q, 4 * num_kv_heads, DType::bfloat16);
    call.options.max_seqlen_q = *std::max_element(lengths_q.begin(), lengths_q.end());
    if (splits) expect_splits(call);
    call.run_on_gpu();
    call.expect_what_the_cpu_gives();
}

// 192 row tiles: on 132 SMs those of the first round stay whole.
TEST(CudaPrefillSplits, OfTheLastRoundAlone) {
    expect_agreement(128, std::vector<int32_t>(24, 8), std::vector<int32_t>(24, 2048), 8);
}

// 184 row tiles, which of two warpgroups would take another round.
TEST(CudaPrefillSplits, OfThreeWarpgroups) { expect_agreement(128, {1104}, {1500}, 8); }

// Calls with so few keys that four warpgroups serve best.
TEST(CudaPrefillSplits, OfFourWarpgroups) { expect_agreement(64, {200}, {650}, 2); }

// A row tile a sequence, and nothing left to share out.
TEST(CudaPrefillSplits, NoneAfterWholeRounds) {
    for (const int32_t count : {num_sms(), 2 * num_sms()}) {
        expect_agreement(128, std::vector<int32_t>(count, 8), std::vector<int32_t>(count, 300), 1, false);
    }
}

// The parts are those of the capture: of shorter sequences some have no key, and of other numbers of queries
// there are fewer row tiles.
TEST(CudaPrefillSplits, ReplayWithOtherLengths) {
    struct Lengths {
        std::vector<int32_t> q, k;  // as many queries in all
    };
    const Lengths captured{{100, 0, 129}, {4000, 700, 2600}};
    const Lengths replayed[] = {captured,
                                {{100, 0, 129}, {101, 0, 500}},
                                {{0, 200, 29}, {0, 690, 1400}},
                                {{129, 100, 0}, {129, 100, 2600}},  // no keys but the new ones
                                {{129, 0, 100}, {0, 0, 0}},
                                captured};
    for (const int64_t head_dim : {64, 96, 128, 192, 256}) {
        SCOPED_TRACE(head_dim);
        Random random(head_dim);
        const DType dtype = random.pick({DType::float16, DType::bfloat16});
        Cache cache(random, captured.k, 16, 2, head_dim, dtype);
        PagedCall call(random, cache, captured.q, 8, dtype);
        call.options.max_seqlen_q = 200;
        expect_splits(call);
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
        call.options.stream = stream;
        ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
        paged_attention(call.on_gpu());
        ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
        for (const Lengths& lengths : replayed) {
            call.cu_seqlens_q.set(cumulative(lengths.q));
            call.lengths.set(lengths.k);
            call.poison_outputs();
            ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
            ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            call.expect_what_the_cpu_gives();
            if (HasFatalFailure()) return;
        }
        cudaGraphExecDestroy(executable);
        cudaGraphDestroy(graph);
        cudaStreamDestroy(stream);
    }
}

// A few long sequences among many short ones: the keys of their row tiles alone are shared out.
class CudaPrefillByLengthTest : public ::testing::TestWithParam<unsigned> {
  protected:
    Random random_{GetParam()};
    const int64_t head_dim_ = random_.pick({64, 96, 128, 128, 192, 256});
    const int64_t group_size_ = random_.pick({1, 3, 4, 5, 6, 8, 16});
    const int64_t num_kv_heads_ = group_size_ == 16 ? 1 : random_.pick({1, 2, 3});
};

TEST_P(CudaPrefillByLengthTest, AgreesWithTheCpu) {
    // With 33 rows there is a row tile of many rows.
    std::vector<int32_t> lengths_q{random_.pick({1, 2, 5, 33, 130}), 33, 1};
    std::vector<int32_t> lengths_k{random_.pick({3000, 6001, 9000}), 1, random_.pick({5, 4500})};
    for (int32_t i = random_.pick({5, 31, 40, 70}); i > 0; --i) {
        lengths_q.push_back(random_.pick({0, 1, 1, 1, 2, 4, 17, 70}));
        lengths_k.push_back(random_.pick({0, 1, 16, 130}));
    }
    for (size_t b = 0; b < lengths_q.size(); ++b) lengths_k[b] += lengths_k[b] > 0 ? lengths_q[b] : 0;
    std::swap(lengths_q[0], lengths_q.back());  // not always the first sequence
    std::swap(lengths_k[0], lengths_k.back());
    const DType dtype = random_.pick({DType::float16, DType::bfloat16});
    Cache cache(random_, lengths_k, random_.pick({1, 5, 8, 16, 24, 256}), num_kv_heads_, head_dim_, dtype);
    PagedCall call(random_, cache, lengths_q, num_kv_heads_ * group_size_, dtype);
    pick_masks(random_, call.options);
    call.options.max_seqlen_q = random_.pick({130, 257});
    call.with_lse = !random_.one_in(4);
    if (random_.one_in(3)) call.pick_prefix_lens(random_);
    // With a window, lengths make less of a difference.
    const bool sees_all = call.options.window_left < 0 && call.options.attention_chunk == 0;
    if (sees_all && is_hopper() && kind_of(call.explained()) == "sm90_attention") {
        EXPECT_EQ(field(call.explained(), "by_length"), "true");
    }
    call.run_on_cpu();
    call.expect_right(paged_attention);
}

// One query for each sequence, which needs no packed queries.
TEST_P(CudaPrefillByLengthTest, OfManyHeads) {
    std::vector<int32_t> lengths{random_.pick({5000, 9001})};
    for (int32_t i = random_.pick({12, 40, 70}); i > 0; --i)
        lengths.push_back(random_.pick({0, 1, 16, 130, 300}));
    std::shuffle(lengths.begin(), lengths.end(), random_.engine());
    Cache cache(random_, lengths, 16, num_kv_heads_, head_dim_, DType::bfloat16);
    PagedCall call(random_, cache, 1, num_kv_heads_ * random_.pick({24, 48}), DType::bfloat16);
    if (is_hopper() && kind_of(call.explained()) == "sm90_attention") {
        EXPECT_EQ(field(call.explained(), "by_length"), "true");
    }
    call.run_on_cpu();
    call.expect_right(paged_attention);
}

// Lengths that are unlike, alike and zero, in the same arrays and workspace. Twice the same bits.
TEST(CudaPrefillByLength, WithOtherLengths) {
    const std::vector<int32_t> lengths_q{70, 1, 1, 33, 4, 1, 17, 1};
    const std::vector<int32_t> lengths_k[] = {
        {90, 8000, 20, 40, 5, 6, 30, 9},  {8000, 8000, 8000, 8000, 8000, 8000, 8000, 8000},
        {70, 1, 1, 8000, 8000, 1, 17, 1}, {8000, 1, 7000, 0, 4, 0, 17, 1},
        {0, 0, 0, 0, 0, 0, 0, 0},         {70, 1, 1, 33, 4, 1, 17, 1}};
    for (const int64_t head_dim : {64, 96, 128, 192, 256}) {
        SCOPED_TRACE(head_dim);
        Random random(head_dim);
        Cache cache(random, lengths_k[1], 16, 2, head_dim, DType::bfloat16);
        cache.widen(2 * cache.max_pages);  // room in the table says that lengths are unlike
        PagedCall call(random, cache, lengths_q, 12, DType::bfloat16);
        call.options.max_seqlen_q = 70;
        if (is_hopper()) {
            EXPECT_EQ(field(call.explained(), "by_length"), "true");
        }
        for (const std::vector<int32_t>& lengths : lengths_k) {
            call.lengths.set(lengths);
            call.poison_outputs();
            call.run_on_gpu();
            call.expect_what_the_cpu_gives();
            if (HasFatalFailure()) return;
            const PagedCall::Results first = call.fetch();
            call.poison_outputs();
            call.run_on_gpu();
            ASSERT_TRUE(first.out == call.fetch().out);
        }
    }
}

// A row tile of few rows waits for queries of its own, however far one warpgroup could get ahead before.
TEST(CudaPrefillFewRows, BehindRowTilesWithoutKeys) {
    const FewRowsBehindPadding batch(num_sms());
    for (const int64_t head_dim : {128, 192, 256}) {
        SCOPED_TRACE(head_dim);
        Random random(head_dim);
        const DType dtype = random.pick({DType::float16, DType::bfloat16});
        Cache cache(random, batch.lengths_k, 16, batch.kKvHeads, head_dim, dtype);
        PagedCall call(random, cache, batch.lengths_q, batch.kGroupSize * batch.kKvHeads, dtype);
        call.options.max_seqlen_q = 16;
        call.run_on_cpu();
        call.expect_right([](const PagedAttentionArgs& args) {
            if (!is_hopper()) return paged_attention(args);
            const AttentionParams p = check_paged_attention(args);
            std::string why_not;
            const auto plan = cuda::plan_sm90_attention(p, cuda::gpu_of(0), &why_not);
            ASSERT_TRUE(plan) << why_not;
            ASSERT_EQ(field(describe(*plan), "feature"), "few_rows");
            cuda::run(p, *plan, nullptr);
        });
    }
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaPrefillTest, ::testing::Range(0u, 60u));
INSTANTIATE_TEST_SUITE_P(Seeds, CudaPrefillSplitsTest, ::testing::Range(0u, 90u));
INSTANTIATE_TEST_SUITE_P(Seeds, CudaPrefillByLengthTest, ::testing::Range(0u, 90u));
INSTANTIATE_TEST_SUITE_P(Seeds, CudaPrefillBitsTest, ::testing::Range(0u, 18u));  // every head dim

}  // namespace
}  // namespace octavo
