// The gradients of attention: the GPU against the CPU, by the public operators.
#include "checks/checks.h"
#include "cuda/attention_backward/run.h"
#include "cuda/backend.h"
#include "cuda/sm80_backward/plan.h"
#include "cuda/sm90_backward/plan.h"
#include "cuda_testing.h"

#include <octavo/attention.h>

#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

namespace octavo {
namespace {

enum class Kind {
    full,
    causal,
    window,
    chunks,
    prefix,
    softcap,
    alibi,
    dropout,
    deterministic,
    sinks,
    blocks,
    blocks_in_chunks,
    symmetric,
    symmetric_dropout,
    symmetric_blocks,
    ranges,
    ranges_in_windows,
    ranges_dropout
};

// ALiBi of queries that see keys past their own positions.
bool is_symmetric(Kind kind) {
    return kind == Kind::symmetric || kind == Kind::symmetric_dropout || kind == Kind::symmetric_blocks;
}
bool has_alibi(Kind kind) { return kind == Kind::alibi || is_symmetric(kind); }
bool asks_for_slopes(Kind kind) { return has_alibi(kind) && kind != Kind::symmetric_dropout; }
bool has_blocks(Kind kind) {
    return kind == Kind::blocks || kind == Kind::blocks_in_chunks || kind == Kind::symmetric_blocks;
}

bool has_ranges(Kind kind) {
    return kind == Kind::ranges || kind == Kind::ranges_in_windows || kind == Kind::ranges_dropout;
}

class CudaBackwardTest : public ::testing::TestWithParam<std::tuple<int64_t, bool, Kind>> {};

// Computes the gradients with the kernels for all GPUs, on whichever GPU there is.
void run_sm80_backward(const AttentionBackwardArgs& args) {
    const AttentionBackwardParams params = check_attention_backward(args);
    cuda::run(params, cuda::plan_sm80_backward(params, cuda::gpu_of(0)), nullptr);
}

// Sums of dQ in turns, in an order for each of which there are long calls.
template <int32_t kGrouped, int32_t kMixed, bool kFallingFirst>
void run_in_turns(const AttentionBackwardArgs& args) {
    AttentionBackwardParams params = check_attention_backward(args);
    params.deterministic = true;
    std::optional<cuda::Sm90BackwardPlan> plan =
        cuda::plan_sm90_backward(params, cuda::gpu_of(0), nullptr, true);
    ASSERT_TRUE(plan && plan->feature == cuda::Sm90BackwardFeature::ordered);
    cuda::TurnOrder& order = plan->turn_order;
    order = {order.tiles, order.pairs, kGrouped, kMixed, kFallingFirst};
    cuda::run(params, *plan, nullptr);
}

// By a few CTAs, each of which works through many tiles of keys, and converts sums of dQ between them.
template <int32_t kCtas>
void run_with_few_ctas(const AttentionBackwardArgs& args) {
    const AttentionBackwardParams params = check_attention_backward(args);
    std::optional<cuda::Sm90BackwardPlan> plan = cuda::plan_sm90_backward(params, cuda::gpu_of(0));
    ASSERT_TRUE(plan && plan->tiles().persistent());
    plan->num_ctas = kCtas;
    cuda::run(params, *plan, nullptr);
}

// The lengths of packed sequences.
struct Lengths {
    std::vector<int32_t> q{130, 0, 41}, k{200, 7, 60};
};

// `longer`: how many times as long sequences are.
void compare_with_the_cpu(int64_t head_dim, int64_t value_dim, bool packed, Kind kind, ArrayPlace place,
                          void (*backward_on_gpu)(const AttentionBackwardArgs&) = attention_backward,
                          int32_t longer = 1, const Lengths& lengths = {}) {
    constexpr int64_t kHeads = 2, kGroup = 3;
    const auto batch = packed ? static_cast<int64_t>(lengths.q.size()) : 3;
    Random random(static_cast<unsigned>(head_dim) + static_cast<unsigned>(kind));
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t length_q = 90 * longer, length_k = 140 * longer;
    std::vector<int32_t> lengths_q = packed ? lengths.q : std::vector<int32_t>{90, 90, 90};
    std::vector<int32_t> lengths_k = packed ? lengths.k : std::vector<int32_t>{140, 140, 140};
    for (std::vector<int32_t>* of : {&lengths_q, &lengths_k}) {
        for (int32_t& length : *of) length *= longer;
    }
    const int64_t total_q = std::accumulate(lengths_q.begin(), lengths_q.end(), 0);
    const int64_t total_k = std::accumulate(lengths_k.begin(), lengths_k.end(), 0);
    const size_t q_size = total_q * kHeads * kGroup * head_dim, k_size = total_k * kHeads * head_dim;
    const size_t out_size = total_q * kHeads * kGroup * value_dim, v_size = total_k * kHeads * value_dim;
    Mirror<uint16_t> q(random.normal(q_size, dtype), place), k(random.normal(k_size, dtype), place);
    Mirror<uint16_t> v(random.normal(v_size, dtype), place), dout(random.normal(out_size, dtype), place);
    Mirror<uint16_t> out(nans(out_size, dtype), place), dq(nans(q_size, dtype), place);
    Mirror<uint16_t> dk(nans(k_size, dtype), place), dv(nans(v_size, dtype), place);
    Mirror<float> lse(std::vector<float>(total_q * kHeads * kGroup, NAN));
    Mirror<float> slopes(slopes_for(kHeads * kGroup)), dalibi(std::vector<float>(kHeads * kGroup, NAN));
    Mirror<float> sinks(sinks_for(kHeads * kGroup)), dsinks(std::vector<float>(kHeads * kGroup, NAN));
    Mirror<int32_t> cu_q(cumulative(lengths_q)), cu_k(cumulative(lengths_k)), prefix({20, 5, 60});
    Mirror<int32_t> ranges(random_ranges(random, lengths_k));
    // Blocks of 64 of the longest sequence, or of all tokens where none says what is the longest.
    const int64_t q_blocks = ((packed ? total_q : length_q) + 63) / 64;
    const int64_t k_blocks = ((packed ? total_k : length_k) + 63) / 64;
    Mirror<uint8_t> blocks(random.blocks(kHeads * kGroup * q_blocks * k_blocks));

    // Scores near the cap, far from it, and in between take ways of their own.
    constexpr double kSoftcaps[] = {3.0, 10.0, 40.0};
    const double softcap = kSoftcaps[(head_dim / 64 + packed) % 3];

    auto rows = [&](auto on, Mirror<uint16_t>& x, int64_t length, int64_t heads, int64_t dim) {
        return packed ? on(x, dtype, {static_cast<int64_t>(x.host.size()) / heads / dim, heads, dim})
                      : on(x, dtype, {batch, length, heads, dim});
    };
    auto set = [&](auto& args, auto on) {
        args.q = rows(on, q, length_q, kHeads * kGroup, head_dim);
        args.k = rows(on, k, length_k, kHeads, head_dim);
        args.v = rows(on, v, length_k, kHeads, value_dim);
        args.out = rows(on, out, length_q, kHeads * kGroup, value_dim);
        const TensorView of_queries = packed ? on(lse, DType::float32, {total_q, kHeads * kGroup})
                                             : on(lse, DType::float32, {batch, length_q, kHeads * kGroup});
        args.lse = of_queries;
        if (packed) {
            args.cu_seqlens_q = on(cu_q, DType::int32, {batch + 1});
            args.cu_seqlens_k = on(cu_k, DType::int32, {batch + 1});
        }
        args.causal = kind != Kind::full && kind != Kind::window && !is_symmetric(kind);
        if (kind == Kind::window) args.window_left = 30, args.window_right = 10;
        if (kind == Kind::chunks || kind == Kind::blocks_in_chunks) args.attention_chunk = packed ? 37 : 64;
        if (kind == Kind::prefix) args.prefix_lens = on(prefix, DType::int32, {batch});
        if (kind == Kind::softcap) args.softcap = softcap;
        if (has_alibi(kind)) args.alibi_slopes = on(slopes, DType::float32, {kHeads * kGroup});
        args.alibi_symmetric = is_symmetric(kind);
        if (kind == Kind::sinks) args.sinks = on(sinks, DType::float32, {kHeads * kGroup});
        if (has_blocks(kind)) {
            args.block_mask = on(blocks, DType::uint8, {kHeads * kGroup, q_blocks, k_blocks});
            args.block_size = 64;
        }
        if (has_ranges(kind)) args.bidirectional_ranges = on(ranges, DType::int32, {batch, kNumRanges, 2});
        if (kind == Kind::ranges_in_windows) {
            args.window_left = 20;
            args.ranges_keep_window_left = packed;
            if (head_dim == 128) args.attention_chunk = 64;
        }
        if (kind == Kind::dropout || kind == Kind::symmetric_dropout || kind == Kind::ranges_dropout)
            args.dropout_p = packed ? 0.3 : 0.6, args.dropout_seed = 5;
    };
    auto forward = [&](auto on) {
        AttentionArgs args;
        set(args, on);
        attention(args);
    };
    auto backward = [&](auto on, auto run) {
        AttentionBackwardArgs args;
        set(args, on);
        args.deterministic = kind == Kind::deterministic;
        args.dout = rows(on, dout, length_q, kHeads * kGroup, value_dim);
        args.dq = rows(on, dq, length_q, kHeads * kGroup, head_dim);
        args.dk = rows(on, dk, length_k, kHeads, head_dim);
        args.dv = rows(on, dv, length_k, kHeads, value_dim);
        if (asks_for_slopes(kind)) args.dalibi_slopes = on(dalibi, DType::float32, {kHeads * kGroup});
        if (kind == Kind::sinks) args.dsinks = on(dsinks, DType::float32, {kHeads * kGroup});
        run(args);
    };
    forward(kOnHost);
    if (backward_on_gpu == attention_backward) forward(kOnGpu);
    // The gradients of the slopes weigh the rounding of out by distances, so both start from the same out.
    out.upload(out.host);
    lse.upload(lse.host);
    backward(kOnHost, attention_backward);
    backward(kOnGpu, backward_on_gpu);
    expect_near(dq.fetch(), dq.host, dtype, "dq");
    expect_near(dk.fetch(), dk.host, dtype, "dk");
    expect_near(dv.fetch(), dv.host, dtype, "dv");
    if (!asks_for_slopes(kind) && kind != Kind::sinks) return;
    const Mirror<float>& of_heads = asks_for_slopes(kind) ? dalibi : dsinks;
    const std::vector<float> on_gpu = of_heads.fetch();
    float largest = 0.0f;
    for (float x : of_heads.host) largest = std::max(largest, std::fabs(x));
    for (size_t i = 0; i < on_gpu.size(); ++i) EXPECT_NEAR(on_gpu[i], of_heads.host[i], 0.02f * largest) << i;
}

TEST_P(CudaBackwardTest, AgainstTheCpu) {
    const auto [head_dim, packed, kind] = GetParam();
    compare_with_the_cpu(head_dim, head_dim, packed, kind, ArrayPlace::anywhere);
}

TEST_P(CudaBackwardTest, KernelsForAllGpusAgainstTheCpu) {
    const auto [head_dim, packed, kind] = GetParam();
    compare_with_the_cpu(head_dim, head_dim, packed, kind, ArrayPlace::anywhere, run_sm80_backward);
}

class CudaBackwardInTurnsTest : public CudaBackwardTest {};

TEST_P(CudaBackwardInTurnsTest, AgainstTheCpu) {
    const auto [head_dim, packed, kind] = GetParam();
    if (!cuda::gpu_of(0).has_sm90_kernels) GTEST_SKIP() << "Hopper alone takes turns";
    for (auto* run : {run_in_turns<1, 0, true>, run_in_turns<1, 1, true>, run_in_turns<1, 0, false>,
                      run_in_turns<2, 0, true>, run_in_turns<2, 0, false>})
        compare_with_the_cpu(head_dim, head_dim, packed, kind, ArrayPlace::anywhere, run, 5);
}

class CudaBackwardFewCtasTest : public CudaBackwardTest {};

TEST_P(CudaBackwardFewCtasTest, AgainstTheCpu) {
    const auto [head_dim, packed, kind] = GetParam();
    if (!cuda::gpu_of(0).has_sm90_kernels) GTEST_SKIP() << "elsewhere a CTA has one tile";
    for (auto* run : {run_with_few_ctas<1>, run_with_few_ctas<3>})
        compare_with_the_cpu(head_dim, head_dim, packed, kind, ArrayPlace::anywhere, run, 4);
}

// Warps that convert sums find by counts which of them are complete.
TEST(CudaBackward, SumsAreConvertedWhateverTheLengths) {
    if (!cuda::gpu_of(0).has_sm90_kernels) GTEST_SKIP() << "elsewhere sums have a kernel of their own";
    const Lengths kLengths[] = {{{130, 90, 41}, {0, 7, 0}},     // queries without keys
                                {{130, 41, 0}, {200, 60, 30}},  // keys without queries
                                {std::vector<int32_t>(50, 70), std::vector<int32_t>(50, 140)}};  // many sums
    for (int64_t head_dim : {64, 96, 128}) {
        for (const Lengths& lengths : kLengths) {
            SCOPED_TRACE(testing::Message() << head_dim << ", " << &lengths - kLengths);
            for (auto* run : {attention_backward, run_with_few_ctas<1>, run_with_few_ctas<3>}) {
                compare_with_the_cpu(head_dim, head_dim, true, Kind::full, ArrayPlace::anywhere, run, 1,
                                     lengths);
            }
        }
    }
}

// For a box of rows that lies outside an array altogether, the copy engine reads the address from which it
// counts rows, and that lies before the array.
TEST(CudaBackward, NothingIsReadBeforeTheArrays) {
    for (int64_t head_dim : {64, 96, 128, 160, 168, 192, 256}) {
        for (Kind kind : {Kind::causal, Kind::deterministic})
            compare_with_the_cpu(head_dim, head_dim, true, kind, ArrayPlace::behind_a_gap);
    }
}

// By Hopper's kernel where both are equally many blocks of 64 columns.
TEST(CudaBackward, ValuesHaveADimOfTheirOwn) {
    constexpr std::pair<int64_t, int64_t> kDims[] = {{192, 128}, {128, 120}, {72, 40},  {80, 96},  {96, 104},
                                                     {192, 168}, {40, 64},   {96, 256}, {200, 248}};
    for (const auto& [head_dim, value_dim] : kDims) {
        for (Kind kind : {Kind::full, Kind::causal, Kind::prefix, Kind::alibi, Kind::symmetric, Kind::dropout,
                          Kind::deterministic, Kind::sinks, Kind::blocks, Kind::ranges}) {
            SCOPED_TRACE(testing::Message()
                         << head_dim << ", " << value_dim << ", " << static_cast<int>(kind));
            compare_with_the_cpu(head_dim, value_dim, kind == Kind::causal, kind, ArrayPlace::anywhere);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(
    All, CudaBackwardTest,
    ::testing::Combine(::testing::Values(64, 96, 128, 160, 192, 256), ::testing::Bool(),
                       ::testing::Values(Kind::full, Kind::causal, Kind::window, Kind::chunks, Kind::prefix,
                                         Kind::softcap, Kind::alibi, Kind::symmetric, Kind::symmetric_dropout,
                                         Kind::symmetric_blocks, Kind::dropout, Kind::deterministic,
                                         Kind::sinks, Kind::blocks, Kind::blocks_in_chunks, Kind::ranges,
                                         Kind::ranges_in_windows, Kind::ranges_dropout)));

INSTANTIATE_TEST_SUITE_P(All, CudaBackwardFewCtasTest,
                         ::testing::Combine(::testing::Values(64, 72, 96, 128), ::testing::Bool(),
                                            ::testing::Values(Kind::full, Kind::causal, Kind::window,
                                                              Kind::chunks, Kind::prefix, Kind::softcap,
                                                              Kind::alibi, Kind::symmetric, Kind::dropout,
                                                              Kind::sinks, Kind::blocks)));

INSTANTIATE_TEST_SUITE_P(All, CudaBackwardInTurnsTest,
                         ::testing::Combine(::testing::Values(64, 96, 128), ::testing::Bool(),
                                            ::testing::Values(Kind::full, Kind::causal, Kind::window,
                                                              Kind::chunks, Kind::prefix, Kind::sinks)));

}  // namespace
}  // namespace octavo
