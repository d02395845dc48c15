// Decoding on CUDA where the host shares out the work, one sequence, a few or many, against the CPU: every
// length, page size and shape that the split-KV kernel meets, and captured graphs whose lengths change.
#include "paged_call.h"

#include "cuda/decode/plan.h"

#include <octavo/paged_attention.h>

#include <array>
#include <memory>
#include <string>
#include <utility>

namespace octavo {
namespace {

struct Shape {
    int64_t num_kv_heads, group_size, head_dim, page_size;
    int32_t seqlen_q = 1;
    int32_t enough = kManyKeys;  // for scaled_batch
};

// A batch whose page table has `spare_pages` columns more than it needs. On a small scale it has that room as
// well.
struct Problem {
    Problem(unsigned seed, const Shape& shape, const std::vector<int32_t>& lengths, int64_t spare_pages)
        : random(seed),
          dtype(random.pick({DType::float16, DType::bfloat16})),
          cache(widened(
              {random, at_least(scaled_batch(lengths, shape.num_kv_heads, shape.enough), shape.seqlen_q),
               shape.page_size, scaled_heads(shape.num_kv_heads), shape.head_dim, dtype},
              spare_pages, lengths)),
          call(random, cache, shape.seqlen_q, cache.num_kv_heads * shape.group_size, dtype) {
        call.options.causal = !random.one_in(4);
        if (random.one_in(4)) call.options.softcap = 20.0;
        call.with_alibi = random.one_in(3);
        if (!call.options.causal && random.one_in(2)) call.options.window_right = random.pick({0, 1, 2});
    }
    // Which the kernels for decoding take with one query of each sequence.
    bool has_chunks() { return call.options.causal && !call.packed && random.one_in(2); }
    static Cache widened(Cache cache, int64_t spare_pages, const std::vector<int32_t>& lengths) {
        if (is_small_scale())
            spare_pages += (*std::max_element(lengths.begin(), lengths.end()) -
                            *std::max_element(cache.lengths.begin(), cache.lengths.end())) /
                           cache.page_size;
        cache.widen(cache.max_pages + std::max<int64_t>(spare_pages, 0));
        return cache;
    }
    int64_t num_items() const { return cache.batch * cache.num_kv_heads; }

    Random random;
    DType dtype;
    Cache cache;
    PagedCall call;
};

constexpr Shape kShapes[] = {
    {32, 1, 128, 16},   {8, 4, 128, 16},   {1, 8, 128, 16},     {2, 16, 128, 16},  {4, 7, 128, 64},
    {8, 5, 128, 1},     {3, 4, 64, 8},     {40, 1, 64, 24},     {2, 8, 96, 16},    {5, 3, 80, 5},
    {2, 8, 256, 16},    {16, 1, 192, 24},  {1, 4, 256, 1},      {132, 1, 64, 16},  {140, 1, 64, 16},
    {2, 4, 128, 16, 4}, {4, 2, 64, 24, 3}, {1, 2, 256, 16, 4},  {2, 1, 96, 1, 16}, {70, 2, 128, 48},
    {1, 1, 128, 256},   {1, 16, 96, 3},    {12, 4, 192, 16, 2},
};

void expect_policy(Problem& problem, const std::string& policy) {
    EXPECT_EQ(decode_policy(problem.call), policy) << problem.call.name();
}

// Without masks, and in every third problem with keys that all see, or a window, or both.
void expect_right(Problem& problem) {
    PagedCall& call = problem.call;
    Random& random = problem.random;
    expect_every_decode_right(call);
    if (::testing::Test::HasFatalFailure() || !random.one_in(3)) return;
    const int masks = random.pick({1, 2, 3});
    if (masks & 1) call.pick_prefix_lens(random);
    if (masks & 2) call.options.window_left = random.pick({0, 10, 90, 300});
    if (masks & 2 && problem.has_chunks()) call.options.attention_chunk = random.pick({1, 16, 100, 1000});
    expect_every_decode_right(call);
}

// Calls of one shape.
class CudaDecodeDealtTest : public ::testing::TestWithParam<size_t> {
  protected:
    const Shape& shape_ = kShapes[GetParam()];
};

TEST_P(CudaDecodeDealtTest, AgreesWithTheCpu) {
    constexpr int32_t kLengths[] = {0, 1, 15, 16, 17, 100, 129, 1000, 2049};
    unsigned seed = 1 + std::size(kLengths) * GetParam();
    for (const int32_t length : kLengths) {
        if (is_small_scale() && length != 17 && length != 129 && length != 2049) continue;
        Problem problem(seed, shape_, {length}, seed % 3 == 0 ? 0 : seed % 3 * 200);
        ++seed;
        if (problem.cache.num_kv_heads <= num_sms()) expect_policy(problem, "even");
        expect_right(problem);
        if (HasFatalFailure()) return;
    }
}

TEST_P(CudaDecodeDealtTest, AgreesWithTheCpuOnShortSequences) {
    unsigned seed = 500 + 2 * GetParam();
    for (const size_t batch : {3, 40}) {
        const int32_t most = batch == 3 ? 240 : 100;
        std::vector<int32_t> lengths(batch);
        for (size_t i = 0; i < batch; ++i) lengths[i] = static_cast<int32_t>(i * 37 % (most + 1));
        Problem problem(seed++, shape_, lengths, 0);
        expect_right(problem);
        if (HasFatalFailure()) return;
    }
}

TEST_P(CudaDecodeDealtTest, AgreesWithTheCpuOnFewSequences) {
    const std::vector<int32_t> batches[] = {{400, 400},
                                            {1, 1501},
                                            {0, 300, 0},
                                            {1049, 17, 300, 499},
                                            {0, 0, 0},
                                            {16, 32, 48, 64},
                                            {5, 5, 1300, 5, 5, 5, 5, 700}};
    unsigned seed = 3000 + std::size(batches) * GetParam();
    for (const std::vector<int32_t>& lengths : batches) {
        const unsigned own_seed = seed++;
        if (is_small_scale() && own_seed % 2 == 0) continue;
        Problem problem(own_seed, shape_, lengths, own_seed % 2 * 60);
        if (2 * problem.num_items() <= num_sms()) {
            EXPECT_EQ(kind_of(problem.call.explained()), "split_kv_decode") << problem.call.name();
        }
        expect_right(problem);
        if (HasFatalFailure()) return;
    }
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaDecodeDealtTest, ::testing::Range(size_t{0}, std::size(kShapes)));

TEST(CudaDecodeDealt, AgreesWithTheCpuOnLongSequences) {
    unsigned seed = 1000;
    for (const Shape& shape :
         {Shape{1, 8, 128, 16}, Shape{2, 4, 64, 1}, Shape{1, 2, 256, 7}, Shape{3, 1, 128, 64}}) {
        for (const int32_t length : {5003, 20011}) {
            Problem problem(seed++, shape, {length}, 40);
            expect_policy(problem, "even");
            expect_right(problem);
            if (HasFatalFailure()) return;
        }
    }
}

TEST(CudaDecodeDealt, AgreesWithTheCpuOnThirtyTwoSequences) {
    unsigned seed = 4000;
    for (const Shape& shape : {Shape{1, 8, 128, 16}, Shape{2, 4, 64, 24}, Shape{1, 1, 256, 1}}) {
        for (const int32_t longest : {400, 2000}) {
            std::vector<int32_t> lengths(32);
            for (int32_t i = 0; i < 32; ++i) lengths[i] = i * i * 389 % longest;
            Problem problem(seed++, shape, lengths, 30);
            // On a small scale their room makes so many splits of one size of head dim 256.
            if (2 * problem.num_items() <= num_sms() && (shape.head_dim <= 128 || !is_small_scale()))
                expect_policy(problem, "by_length");
            expect_right(problem);
            if (HasFatalFailure()) return;
        }
    }
}

// So many that each item has one CTA.
TEST(CudaDecodeDealt, AgreesWithTheCpuOnManySequences) {
    unsigned seed = 5000;
    for (const Shape& shape : {Shape{8, 4, 128, 16}, Shape{12, 1, 96, 5}, Shape{16, 2, 64, 48},
                               Shape{8, 8, 80, 16, 2}, Shape{10, 1, 256, 16}}) {
        std::vector<int32_t> lengths(110);
        for (int32_t i = 0; i < 110; ++i) lengths[i] = i * 37 % 431;
        Problem problem(seed++, shape, lengths, 0);
        if (problem.num_items() >= (is_small_scale() ? 4 : 6) * num_sms()) {
            expect_policy(problem, "even");
            EXPECT_EQ(field(problem.call.explained(), "items"), "many") << problem.call.name();
        }
        expect_right(problem);
        if (HasFatalFailure()) return;
    }
}

// Longer and shorter ones, of which each asks for as many CTAs as its length is worth.
TEST(CudaDecodeDealt, AgreesWithTheCpuOnRaggedBatches) {
    unsigned seed = 6000;
    for (Shape shape : {Shape{8, 4, 128, 16}, Shape{4, 16, 96, 1}, Shape{2, 1, 64, 24}, Shape{2, 4, 256, 5},
                        Shape{4, 4, 128, 64, 4}, Shape{5, 2, 192, 16, 3}}) {
        shape.enough = 1100;  // splits of one size are long
        for (const int32_t batch : {33, 60}) {
            if (is_small_scale() && batch == 60) continue;
            std::vector<int32_t> lengths(batch);
            for (int32_t i = 0; i < batch; ++i) lengths[i] = i * i * 389 % (i % 7 == 3 ? 2000 : 300);
            Problem problem(seed++, shape, lengths, 1000 / shape.page_size);
            if (num_sms() == 132 || is_small_scale()) expect_policy(problem, "sized");
            expect_right(problem);
            if (HasFatalFailure()) return;
        }
    }
}

// ---- plans that would not be chosen

struct OtherPlan {
    cuda::SplitPolicy policy;
    cuda::SplitKvItems items;
    int32_t num_splits;
    bool combines_in_last_split;
};

// The same problem worked through by another policy, with CTAs of another configuration and in other splits.
cuda::SplitKvPlan altered(cuda::SplitKvPlan plan, const AttentionParams& p, const OtherPlan& other) {
    const auto [policy, items, num_splits, combines_in_last_split] = other;
    const cuda::DecodeTiles& tiles = plan.tiles();
    const int32_t rows = p.seqlen_q * p.group_size();
    int32_t warps = cuda::decode_warps(tiles.head_dim, tiles.row_tiles);
    if (items == cuda::SplitKvItems::many_items) warps = 4;
    if (policy == cuda::SplitPolicy::by_length) warps = cuda::decode_warps(tiles.head_dim, 1);
    plan.policy = policy;
    plan.items = items;
    plan.threads = 32 * warps;
    plan.num_splits = num_splits;
    plan.num_slots = plan.num_sequences * num_splits;
    if (policy == cuda::SplitPolicy::by_length) plan.num_slots = plan.num_sequences + num_splits - 1;
    plan.blocks_per_split = static_cast<int32_t>(cuda::ceil_divide(plan.max_visible_blocks, num_splits));
    plan.length_first = p.window_left >= 0 || p.prefix_lens || policy == cuda::SplitPolicy::by_length ||
                        policy == cuda::SplitPolicy::sized;
    plan.partial_words = plan.combiners_per_item = plan.warps_per_row_log2 = 0;
    if (num_splits == 1) return plan;
    plan.partial_words = rows * (tiles.head_dim + 2 * warps);
    while (1 << plan.warps_per_row_log2 < warps && 8 << plan.warps_per_row_log2 < num_splits)
        ++plan.warps_per_row_log2;
    if (combines_in_last_split) return plan;
    plan.combiners_per_item = static_cast<int32_t>(cuda::ceil_divide(rows, warps >> plan.warps_per_row_log2));
    return plan;
}

void expect_every_plan_right(PagedCall& call) {
    using cuda::SplitKvItems, cuda::SplitPolicy;
    std::vector<OtherPlan> others;
    for (const int32_t num_splits : {1, 2, 7, 40}) {
        if (is_small_scale() && num_splits == 2) continue;
        for (const SplitKvItems items :
             {SplitKvItems::long_items, SplitKvItems::short_items, SplitKvItems::many_items}) {
            others.push_back({SplitPolicy::even, items, num_splits, false});
            others.push_back({SplitPolicy::sized, items, num_splits, false});
        }
        others.push_back({SplitPolicy::by_length, SplitKvItems::long_items, num_splits, false});
        if (num_splits == 1) continue;
        others.push_back({SplitPolicy::even, SplitKvItems::long_items, num_splits, true});
        others.push_back({SplitPolicy::sized, SplitKvItems::many_items, num_splits, true});
        others.push_back({SplitPolicy::by_length, SplitKvItems::long_items, num_splits, true});
    }
    call.run_on_cpu();
    for (const OtherPlan& other : others) {
        SCOPED_TRACE("policy " + std::to_string(static_cast<int>(other.policy)) + ", items " +
                     std::to_string(static_cast<int>(other.items)) + ", splits " +
                     std::to_string(other.num_splits) +
                     (other.combines_in_last_split ? ", combined by the last" : ""));
        auto plan_of = [&other](const AttentionParams& p, const cuda::Gpu& gpu, std::string* why_not) {
            auto plan = cuda::plan_split_kv(p, gpu, why_not);
            if (plan) plan = altered(*plan, p, other);
            return plan;
        };
        call.expect_right([&](const PagedAttentionArgs& args) { run_by(plan_of, args); });
        if (::testing::Test::HasFatalFailure()) return;
    }
}

// Fixed splits have one configuration for CTAs with much to read and one for others, and look at the length
// first or not, as the batch asks for: the bits are those of the item.
void expect_fixed_splits_have_the_same_bits(PagedCall& call) {
    call.options.batch_invariant = true;
    call.run_on_cpu();
    std::optional<PagedCall::Results> first;
    for (const auto items : {cuda::SplitKvItems::long_items, cuda::SplitKvItems::short_items}) {
        for (const bool length_first : {false, true}) {
            auto plan_of = [=](const AttentionParams& p, const cuda::Gpu& gpu, std::string* why_not) {
                auto plan = cuda::plan_split_kv(p, gpu, why_not);
                if (plan) plan->items = items;
                if (plan) plan->length_first = length_first || p.window_left >= 0 || p.prefix_lens;
                return plan;
            };
            call.expect_right([&](const PagedAttentionArgs& args) { run_by(plan_of, args); });
            if (::testing::Test::HasFatalFailure()) return;
            if (!first) first = call.fetch();
            ASSERT_TRUE(call.fetch() == *first) << "length first: " << length_first << ", " << call.name();
        }
    }
    call.options.batch_invariant = false;
}

// For each row of kDecodeTiles.
class CudaSplitKvPlansTest : public ::testing::TestWithParam<size_t> {};

TEST_P(CudaSplitKvPlansTest, AgreeWithTheCpu) {
    const cuda::DecodeTiles& tiles = cuda::kDecodeTiles[GetParam()];
    unsigned seed = 7000 + 10 * static_cast<unsigned>(GetParam());
    size_t combination = 0;
    for (const int64_t page_size : {5, 16}) {
        for (const int32_t seqlen_q : {1, 2}) {
            if (is_small_scale() && combination++ != GetParam() % 4) continue;
            const Shape shape{is_small_scale() ? 1 : 2, tiles.rows() / seqlen_q, tiles.head_dim, page_size,
                              seqlen_q};
            Problem problem(seed++, shape, {0, 1300, 17, 260}, 30);
            expect_every_plan_right(problem.call);
            if (HasFatalFailure()) return;
            expect_fixed_splits_have_the_same_bits(problem.call);
            if (HasFatalFailure()) return;
            problem.call.options.window_left = problem.random.pick({10, 90, 300});
            // On a small scale windows with one row, prefixes with the next.
            if (!is_small_scale() || GetParam() % 2 == 0) expect_every_plan_right(problem.call);
            if (HasFatalFailure()) return;
            problem.call.pick_prefix_lens(problem.random);
            expect_fixed_splits_have_the_same_bits(problem.call);  // which alone serve both
            if (HasFatalFailure()) return;
            problem.call.options.window_left = -1;
            if (!is_small_scale() || GetParam() % 2 == 1) expect_every_plan_right(problem.call);
            if (HasFatalFailure()) return;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Rows, CudaSplitKvPlansTest,
                         ::testing::Range(size_t{0}, std::size(cuda::kDecodeTiles)));

// ---- graphs

// A call to decode that is captured on a stream of its own in each way.
struct CapturedDecode {
    CapturedDecode(unsigned seed, const Shape& shape, int batch, int32_t most, bool with_masks)
        : problem(seed, shape, std::vector<int32_t>(batch, most), 20) {
        PagedCall& call = problem.call;
        if (with_masks) call.pick_prefix_lens(problem.random);
        if (with_masks && problem.random.one_in(2)) call.options.window_left = 200;
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        call.options.stream = stream;
        for (size_t way = 0; way < std::size(kDecodeWays); ++way) {
            cudaGraph_t graph = nullptr;
            EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
            const int num_calls = is_small_scale() ? 1 : 20;
            for (int i = 0; i < num_calls; ++i) kDecodeWays[way].run(call.on_gpu());
            EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
            EXPECT_EQ(cudaGraphInstantiate(&graphs[way], graph, 0), cudaSuccess);
            cudaGraphDestroy(graph);
        }
    }
    ~CapturedDecode() {
        for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
        cudaStreamDestroy(stream);
    }
    CapturedDecode(const CapturedDecode&) = delete;

    Problem problem;
    cudaStream_t stream = nullptr;
    std::array<cudaGraphExec_t, std::size(kDecodeWays)> graphs{};
};

// Two problems on streams of their own, at once, in graphs that were captured with other lengths. Of the last
// shape there are so many sequences that CTAs of fixed splits look at the length first.
TEST(CudaDecodeDealt, ReplaysWithOtherLengths) {
    const std::pair<Shape, int> batches[] = {
        {{32, 1, 128, 16}, 1}, {{8, 4, 128, 1}, 1},  {{1, 8, 128, 24}, 1},   {{2, 8, 64, 16, 2}, 1},
        {{8, 4, 128, 16}, 3},  {{2, 4, 64, 1}, 7},   {{2, 8, 64, 16, 2}, 3}, {{8, 4, 128, 1}, 5},
        {{4, 2, 128, 16}, 40}, {{4, 2, 64, 16}, 40},
    };
    unsigned seed = 2000;
    for (const auto& [shape, full_batch] : batches) {
        if (is_small_scale() && shape.page_size == 1) continue;
        std::unique_ptr<CapturedDecode> captured[2];
        for (int i = 0; i < 2; ++i)
            captured[i] = std::make_unique<CapturedDecode>(seed++, shape, full_batch, 3000, i == 1);
        EXPECT_EQ(kind_of(captured[0]->problem.call.explained()), "split_kv_decode");
        const auto batch = static_cast<int32_t>(captured[0]->problem.cache.batch);
        const int32_t most = captured[0]->problem.cache.lengths[0];
        std::vector<int32_t> replayed{most, 0, 1, 16, 130, 999, 2048, 5};
        if (is_small_scale()) replayed = {most, 130};
        for (const int32_t length : replayed) {
            for (int i = 0; i < 2; ++i) {
                std::vector<int32_t> lengths(batch);  // the first as long as that, others more equal or less
                for (int j = 0; j < batch; ++j)
                    lengths[j] = std::max(j % 2 == 0 ? length - 3 * i - 7 * j : most - length, 0);
                captured[i]->problem.call.lengths.set(at_least(lengths, shape.seqlen_q));
                captured[i]->problem.call.run_on_cpu();
            }
            for (size_t way = 0; way < std::size(kDecodeWays); ++way) {
                SCOPED_TRACE(kDecodeWays[way].name);
                for (const auto& one : captured) one->problem.call.poison_outputs();
                for (const auto& one : captured)
                    ASSERT_EQ(cudaGraphLaunch(one->graphs[way], one->stream), cudaSuccess);
                ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
                for (const auto& one : captured) one->problem.call.expect_what_the_cpu_gave();
                if (HasFatalFailure()) return;
            }
        }
    }
}
}  // namespace
}  // namespace octavo
