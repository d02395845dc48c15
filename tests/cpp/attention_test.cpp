// The operators through the public C++ headers, on the CPU, in float32. The Python tests cover the rest.
#include "allocator_testing.h"
#include "checks/check.h"
#include "checks/checks.h"
#include "common/dropout.h"
#include "common/score.h"
#include "host_arrays.h"

#include <octavo/attention.h>
#include <octavo/page_allocator.h>
#include <octavo/paged_attention.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

namespace octavo {
namespace {

constexpr int64_t kNumQHeads = 6, kNumKvHeads = 2, kHeadDim = 16;
constexpr int64_t kQSize = kNumQHeads * kHeadDim, kKvSize = kNumKvHeads * kHeadDim;  // of one token
constexpr double kTolerance = 2e-6;

// One query token, q [num_q_heads, head_dim], over k and v [seqlen_k, num_kv_heads, head_dim], all of them
// visible, compared with out [num_q_heads, head_dim] and lse [num_q_heads].
void expect_attention(const float* q, const float* k, const float* v, int64_t seqlen_k, const float* out,
                      const float* lse) {
    for (int64_t head = 0; head < kNumQHeads; ++head) {
        int64_t kv_head = head / (kNumQHeads / kNumKvHeads);
        std::vector<double> weights;
        double sum = 0;
        for (int64_t j = 0; j < seqlen_k; ++j) {
            double score = 0;
            for (int64_t d = 0; d < kHeadDim; ++d) {
                score += double{q[head * kHeadDim + d]} * k[j * kKvSize + kv_head * kHeadDim + d];
            }
            weights.push_back(std::exp(score / std::sqrt(double{kHeadDim})));
            sum += weights.back();
        }
        ASSERT_NEAR(lse[head], std::log(sum), kTolerance * 10);
        for (int64_t d = 0; d < kHeadDim; ++d) {
            double expected = 0;
            for (int64_t j = 0; j < seqlen_k; ++j) {
                expected += weights[static_cast<size_t>(j)] / sum * v[j * kKvSize + kv_head * kHeadDim + d];
            }
            ASSERT_NEAR(out[head * kHeadDim + d], expected, kTolerance * 5);
        }
    }
}

// Blocks of 64: the first query block looks at the first key block, the second at the other one.
TEST(Attention, BlockMask) {
    constexpr int64_t kSeqlenQ = 70, kSeqlenK = 100;
    std::mt19937 random(1);
    Floats q = random_floats(random, kSeqlenQ * kQSize);
    Floats k = random_floats(random, kSeqlenK * kKvSize);
    Floats v = random_floats(random, kSeqlenK * kKvSize);
    Floats out(q.size(), NAN), lse(kSeqlenQ * kNumQHeads, NAN);
    std::vector<uint8_t> blocks{1, 0, 0, 1};
    AttentionArgs args;
    args.q = view(q, {1, kSeqlenQ, kNumQHeads, kHeadDim});
    args.k = view(k, {1, kSeqlenK, kNumKvHeads, kHeadDim});
    args.v = view(v, {1, kSeqlenK, kNumKvHeads, kHeadDim});
    args.out = view(out, {1, kSeqlenQ, kNumQHeads, kHeadDim});
    args.lse = view(lse, {1, kSeqlenQ, kNumQHeads});
    args.block_mask = TensorView(blocks.data(), DType::uint8, {1, 2, 2});
    args.block_size = 64;
    attention(args);
    for (int64_t i = 0; i < kSeqlenQ; ++i) {
        const int64_t first = i < 64 ? 0 : 64, count = i < 64 ? 64 : kSeqlenK - 64;
        expect_attention(&q[i * kQSize], &k[first * kKvSize], &v[first * kKvSize], count, &out[i * kQSize],
                         &lse[i * kNumQHeads]);
    }
}

// Scores of 0, so that a query's weights are those of its distances to the keys before and past it.
TEST(Attention, SymmetricAlibi) {
    constexpr int64_t kSeqlenQ = 3, kSeqlenK = 5, kDim = 8;  // queries sit at positions 2, 3 and 4
    Floats q(kSeqlenQ * kDim), k(kSeqlenK * kDim), v(kSeqlenK * kDim), out(q.size(), NAN);
    Floats lse(kSeqlenQ, NAN), slopes{0.75f};
    for (int64_t j = 0; j < kSeqlenK; ++j) v[j * kDim + j] = 1.0f;
    AttentionArgs args;
    args.q = view(q, {1, kSeqlenQ, 1, kDim});
    args.k = view(k, {1, kSeqlenK, 1, kDim});
    args.v = view(v, {1, kSeqlenK, 1, kDim});
    args.out = view(out, {1, kSeqlenQ, 1, kDim});
    args.lse = view(lse, {1, kSeqlenQ, 1});
    args.alibi_slopes = view(slopes, {1});
    args.alibi_symmetric = true;
    attention(args);
    for (int64_t i = 0; i < kSeqlenQ; ++i) {
        auto weight = [&](int64_t j) { return std::exp(-0.75 * std::fabs(static_cast<double>(i + 2 - j))); };
        double sum = 0;
        for (int64_t j = 0; j < kSeqlenK; ++j) sum += weight(j);
        EXPECT_NEAR(lse[i], std::log(sum), kTolerance);
        for (int64_t j = 0; j < kSeqlenK; ++j) EXPECT_NEAR(out[i * kDim + j], weight(j) / sum, kTolerance);
    }
    args.alibi_slopes.reset();
    EXPECT_EQ(message_of<ValueError>([&] { attention(args); }),
              "attention: alibi_symmetric needs alibi_slopes; got none");
}

// The position of the last query and such a window have a sum that 32 bits do not hold.
TEST(Attention, AWindowOfTheGreatestLengthIsUnbounded) {
    Floats q(8), k(8), v(8), out(8);
    AttentionArgs args;
    args.q = view(q, {1, 1, 1, 8});
    args.k = view(k, {1, 1, 1, 8});
    args.v = view(v, {1, 1, 1, 8});
    args.out = view(out, {1, 1, 1, 8});
    for (int64_t window : {kMaxLength - 1, kMaxLength, int64_t{1} << 40}) {
        args.window_left = args.window_right = window;
        const AttentionParams p = check_attention(args);
        EXPECT_EQ(p.window_right, window < kMaxLength ? kMaxLength - 1 : -1);
        EXPECT_EQ(p.window_left, p.window_right);
    }
}

TEST(Attention, ResultsLieApartFromWhatIsRead) {
    Floats q(8), k(8), v(8), out(8), lse(4), sinks(4);
    AttentionArgs args;
    args.q = view(q, {1, 1, 1, 8});
    args.k = view(k, {1, 1, 1, 8});
    args.v = view(v, {1, 1, 1, 8});
    args.out = view(out, {1, 1, 1, 8});
    args.lse = view(lse, {1, 1, 1});
    args.sinks = view(sinks, {1});
    attention(args);
    args.lse = args.sinks;
    args.lse->ndim = 3;
    args.lse->shape = {1, 1, 1};
    EXPECT_EQ(message_of<ValueError>([&] { attention(args); }),
              "attention: lse must not overlap sinks in memory");
    args.lse = view(lse, {1, 1, 1});
    args.sinks = TensorView(out.data() + 7, DType::float32, {1});
    EXPECT_EQ(message_of<ValueError>([&] { attention(args); }),
              "attention: out must not overlap sinks in memory");
}

// Scores of 0, so that a query's result says which keys it sees: each has a value of its own.
TEST(Attention, BidirectionalRanges) {
    constexpr int64_t kSeqlenQ = 4, kSeqlenK = 6, kDim = 8;  // queries sit at positions 2 to 5
    Floats q(kSeqlenQ * kDim), k(kSeqlenK * kDim), v(kSeqlenK * kDim), out(q.size(), NAN);
    for (int64_t j = 0; j < kSeqlenK; ++j) v[j * kDim + j] = 1.0f;
    std::vector<int32_t> ranges{0, 0, 1, 4, 5, 9};
    AttentionArgs args;
    args.q = view(q, {1, kSeqlenQ, 1, kDim});
    args.k = view(k, {1, kSeqlenK, 1, kDim});
    args.v = view(v, {1, kSeqlenK, 1, kDim});
    args.out = view(out, {1, kSeqlenQ, 1, kDim});
    args.causal = true;
    args.bidirectional_ranges = TensorView(ranges.data(), DType::int32, {1, 3, 2});
    auto expect_seen = [&](const std::vector<std::pair<int64_t, int64_t>>& seen) {
        attention(args);
        for (int64_t i = 0; i < kSeqlenQ; ++i) {
            const auto [begin, end] = seen[i];
            for (int64_t j = 0; j < kSeqlenK; ++j) {
                const double weight = j >= begin && j < end ? 1.0 / static_cast<double>(end - begin) : 0.0;
                EXPECT_NEAR(out[i * kDim + j], weight, kTolerance) << i << ", " << j;
            }
        }
    };
    expect_seen({{0, 4}, {0, 4}, {0, 5}, {0, 6}});
    args.window_left = 0;
    expect_seen({{1, 4}, {1, 4}, {4, 5}, {5, 6}});
    args.ranges_keep_window_left = true;
    expect_seen({{2, 4}, {3, 4}, {4, 5}, {5, 6}});
    ranges[3] = 0;
    EXPECT_EQ(
        message_of<ValueError>([&] { attention(args); }),
        "attention: bidirectional_ranges[0, 1], [1, 0), must not end before it begins; a range is its first "
        "position, and the one behind its last");
    args.bidirectional_ranges.reset();
    EXPECT_EQ(message_of<ValueError>([&] { attention(args); }),
              "attention: ranges_keep_window_left needs bidirectional_ranges; got none");
}

TEST(Attention, DenseCausalIsBottomRightAligned) {
    constexpr int64_t kBatch = 2, kSeqlenQ = 3, kSeqlenK = 37;
    std::mt19937 random(1);
    Floats q = random_floats(random, kBatch * kSeqlenQ * kQSize);
    Floats k = random_floats(random, kBatch * kSeqlenK * kKvSize);
    Floats v = random_floats(random, kBatch * kSeqlenK * kKvSize);
    Floats out(q.size(), NAN), lse(kBatch * kSeqlenQ * kNumQHeads, NAN);
    AttentionArgs args;
    args.q = view(q, {kBatch, kSeqlenQ, kNumQHeads, kHeadDim});
    args.k = view(k, {kBatch, kSeqlenK, kNumKvHeads, kHeadDim});
    args.v = view(v, {kBatch, kSeqlenK, kNumKvHeads, kHeadDim});
    args.out = view(out, {kBatch, kSeqlenQ, kNumQHeads, kHeadDim});
    args.lse = view(lse, {kBatch, kSeqlenQ, kNumQHeads});
    args.causal = true;
    attention(args);
    for (int64_t b = 0; b < kBatch; ++b) {
        for (int64_t i = 0; i < kSeqlenQ; ++i) {
            int64_t row = b * kSeqlenQ + i;
            expect_attention(&q[row * kQSize], &k[b * kSeqlenK * kKvSize], &v[b * kSeqlenK * kKvSize],
                             kSeqlenK - kSeqlenQ + i + 1, &out[row * kQSize], &lse[row * kNumQHeads]);
        }
    }
}

// And keys one of up to 512.
TEST(Attention, ValuesMayHaveAHeadDimOfTheirOwn) {
    for (const auto& [head_dim, value_dim] : {std::pair<int64_t, int64_t>{512, 24}, {192, 128}, {8, 264}}) {
        constexpr int64_t kSeqlenK = 37;
        std::mt19937 random(4);
        const Floats q = random_floats(random, head_dim), k = random_floats(random, kSeqlenK * head_dim);
        const Floats v = random_floats(random, kSeqlenK * value_dim);
        Floats out(value_dim, NAN);
        AttentionArgs args;
        args.q = TensorView(const_cast<float*>(q.data()), DType::float32, {1, 1, 1, head_dim});
        args.k = TensorView(const_cast<float*>(k.data()), DType::float32, {1, kSeqlenK, 1, head_dim});
        args.v = TensorView(const_cast<float*>(v.data()), DType::float32, {1, kSeqlenK, 1, value_dim});
        args.out = TensorView(out.data(), DType::float32, {1, 1, 1, value_dim});
        attention(args);
        std::vector<double> weights(kSeqlenK), wanted(value_dim, 0.0);
        double sum = 0.0;
        for (int64_t j = 0; j < kSeqlenK; ++j) {
            double product = 0.0;
            for (int64_t d = 0; d < head_dim; ++d) product += double{q[d]} * k[j * head_dim + d];
            sum += weights[j] = std::exp(product / std::sqrt(static_cast<double>(head_dim)));
        }
        for (int64_t j = 0; j < kSeqlenK; ++j) {
            for (int64_t d = 0; d < value_dim; ++d) wanted[d] += weights[j] / sum * v[j * value_dim + d];
        }
        for (int64_t d = 0; d < value_dim; ++d) ASSERT_NEAR(out[d], wanted[d], 1e-5) << d;
        args.out.shape[3] = head_dim;
        EXPECT_THROW(attention(args), ValueError);

        // The same in pages of five tokens, the first of them last.
        constexpr int64_t kPageSize = 5, kPages = 8;
        Floats k_pages(kPages * kPageSize * head_dim, NAN), v_pages(kPages * kPageSize * value_dim, NAN);
        std::vector<int32_t> table{7, 6, 5, 4, 3, 2, 1, 0}, length{kSeqlenK}, begins{0, kSeqlenK};
        AppendKvArgs append;
        append.k = TensorView(const_cast<float*>(k.data()), DType::float32, {kSeqlenK, 1, head_dim});
        append.v = TensorView(const_cast<float*>(v.data()), DType::float32, {kSeqlenK, 1, value_dim});
        append.k_pages = TensorView(k_pages.data(), DType::float32, {kPages, kPageSize, 1, head_dim});
        append.v_pages = TensorView(v_pages.data(), DType::float32, {kPages, kPageSize, 1, value_dim});
        append.page_table = TensorView(table.data(), DType::int32, {1, kPages});
        append.seq_lens = TensorView(length.data(), DType::int32, {1});
        append.cu_seqlens = TensorView(begins.data(), DType::int32, {2});
        append_kv(append);
        std::fill(out.begin(), out.end(), NAN);
        PagedAttentionArgs paged;
        paged.q = TensorView(const_cast<float*>(q.data()), DType::float32, {1, 1, head_dim});
        paged.out = TensorView(out.data(), DType::float32, {1, 1, value_dim});
        paged.k_pages = append.k_pages;
        paged.v_pages = append.v_pages;
        paged.page_table = *append.page_table;
        paged.seq_lens = *append.seq_lens;
        paged_attention(paged);
        for (int64_t d = 0; d < value_dim; ++d) ASSERT_NEAR(out[d], wanted[d], 1e-5) << d;
        append.v.shape[2] = head_dim;
        EXPECT_THROW(append_kv(append), ValueError);
    }
}

// Rows around the unified maximum and far from it.
TEST(Attention, UnifiedMaximum) {
    constexpr int64_t kSeqlenK = 200;
    std::mt19937 random(3);
    Floats q = random_floats(random, kQSize);
    Floats k = random_floats(random, kSeqlenK * kKvSize), v = random_floats(random, kSeqlenK * kKvSize);
    Floats phi_of_heads = {0.5f, 40.0f, 50.0f, -40.0f, -50.0f, 1e30f};
    AttentionArgs args;
    args.q = view(q, {1, 1, kNumQHeads, kHeadDim});
    args.k = view(k, {1, kSeqlenK, kNumKvHeads, kHeadDim});
    args.v = view(v, {1, kSeqlenK, kNumKvHeads, kHeadDim});
    for (const double phi : {0.0, 1.5, 45.0, -45.0, 1e4, -1e4}) {
        for (const bool is_array : {false, true}) {
            Floats out(q.size(), NAN), lse(kNumQHeads, NAN);
            args.out = view(out, {1, 1, kNumQHeads, kHeadDim});
            args.lse = view(lse, {1, 1, kNumQHeads});
            args.softmax_phi.reset();
            args.softmax_phi_array.reset();
            if (is_array) {
                phi_of_heads[0] = static_cast<float>(phi);
                args.softmax_phi_array = view(phi_of_heads, {kNumQHeads});
            } else {
                args.softmax_phi = phi;
            }
            attention(args);
            expect_attention(q.data(), k.data(), v.data(), kSeqlenK, out.data(), lse.data());
        }
    }
    args.softmax_phi = 0.0;
    EXPECT_EQ(message_of<ValueError>([&] { attention(args); }),
              "attention: softmax_phi must be a number or an array (softmax_phi_array), not both");
}

TEST(Attention, ASinkIsAScoreOfAValueOfZero) {
    constexpr int64_t kSeqlenQ = 3, kSeqlenK = 37;
    std::mt19937 random(1);
    Floats q = random_floats(random, kSeqlenQ * kQSize), k = random_floats(random, kSeqlenK * kKvSize);
    Floats v = random_floats(random, kSeqlenK * kKvSize);
    Floats outs[2], lses[2], sinks{2.0f, -1.0f, 50.0f, -50.0f, 0.0f, -INFINITY};
    AttentionArgs args;
    args.q = view(q, {1, kSeqlenQ, kNumQHeads, kHeadDim});
    args.k = view(k, {1, kSeqlenK, kNumKvHeads, kHeadDim});
    args.v = view(v, {1, kSeqlenK, kNumKvHeads, kHeadDim});
    for (int i : {0, 1}) {
        outs[i].assign(q.size(), NAN);
        lses[i].assign(kSeqlenQ * kNumQHeads, NAN);
        args.out = view(outs[i], {1, kSeqlenQ, kNumQHeads, kHeadDim});
        args.lse = view(lses[i], {1, kSeqlenQ, kNumQHeads});
        if (i == 1) args.sinks = view(sinks, {kNumQHeads});
        attention(args);
    }
    for (size_t row = 0; row < lses[0].size(); ++row) {
        const double lse = lses[0][row], sink = sinks[row % kNumQHeads];
        const double weight = 1.0 / (1.0 + std::exp(sink - lse));
        ASSERT_NEAR(lses[1][row], lse - std::log(weight), 1e-5);
        for (int64_t d = 0; d < kHeadDim; ++d)
            ASSERT_NEAR(outs[1][row * kHeadDim + d], weight * outs[0][row * kHeadDim + d], kTolerance);
    }
}

TEST(Attention, MergesStatesOfDisjointKeys) {
    constexpr int64_t kSeqlenK = 29, kFirst = 11;
    std::mt19937 random(2);
    Floats q = random_floats(random, kQSize);
    Floats k = random_floats(random, kSeqlenK * kKvSize), v = random_floats(random, kSeqlenK * kKvSize);
    Floats out[2] = {Floats(kQSize), Floats(kQSize)}, lse[2] = {Floats(kNumQHeads), Floats(kNumQHeads)};
    for (int part = 0; part < 2; ++part) {
        int64_t begin = part ? kFirst : 0, seqlen_k = part ? kSeqlenK - kFirst : kFirst;
        AttentionArgs args;
        args.q = view(q, {1, 1, kNumQHeads, kHeadDim});
        args.k = TensorView(&k[begin * kKvSize], DType::float32, {1, seqlen_k, kNumKvHeads, kHeadDim});
        args.v = TensorView(&v[begin * kKvSize], DType::float32, {1, seqlen_k, kNumKvHeads, kHeadDim});
        args.out = view(out[part], {1, 1, kNumQHeads, kHeadDim});
        args.lse = view(lse[part], {1, 1, kNumQHeads});
        attention(args);
    }
    MergeStatesArgs merge;
    merge.out_a = view(out[0], {kNumQHeads, kHeadDim});
    merge.lse_a = view(lse[0], {kNumQHeads});
    merge.out_b = view(out[1], {kNumQHeads, kHeadDim});
    merge.lse_b = view(lse[1], {kNumQHeads});
    merge.out = merge.out_a;  // in place
    merge.lse = merge.lse_a;
    merge_states(merge);
    expect_attention(q.data(), k.data(), v.data(), kSeqlenK, out[0].data(), lse[0].data());
}

TEST(Attention, RefusesWhatItCannotTake) {
    Floats q(3 * kHeadDim), kv(2 * kHeadDim), out(3 * kHeadDim);
    AttentionArgs args;
    args.q = view(q, {1, 1, 3, kHeadDim});
    args.k = args.v = view(kv, {1, 1, 2, kHeadDim});
    args.out = view(out, {1, 1, 3, kHeadDim});
    EXPECT_EQ(message_of<ValueError>([&] { attention(args); }),
              "attention: num_q_heads (3) must be a multiple of num_kv_heads (2)");

    // Refused before anything is touched: no memory could hold these.
    args.q = args.out = view(q, {1, int64_t{1} << 28, 8, kHeadDim});
    args.k = args.v = view(kv, {1, 2, 1, kHeadDim});
    EXPECT_EQ(message_of<ValueError>([&] { attention(args); }),
              "attention: seqlen_q * group_size must lie in [0, 1073741824]; got 2147483648");

    args.q = view(q, {1, 1, 2, kHeadDim});
    args.out = TensorView(nullptr, DType::float32, {1, 1, 2, kHeadDim});
    EXPECT_EQ(message_of<ValueError>([&] { attention(args); }),
              "attention: out of shape [1, 1, 2, 16] must have data; its pointer is null");
    args.out = view(out, {1, 1, 2, kHeadDim});
    args.lse = view(out, {1, 1, 2});
    EXPECT_EQ(message_of<ValueError>([&] { attention(args); }),
              "attention: lse must not overlap out in memory");
    args.lse = TensorView(nullptr, DType::float32, {1, 1, 2});
    EXPECT_EQ(message_of<ValueError>([&] { attention(args); }),
              "attention: lse of shape [1, 1, 2] must have data; its pointer is null");
}

// An address is the pointer and a sum of indices times strides modulo 2^64: with these, two rows would be
// one.
TEST(Attention, RefusesViewsThatNoMemoryCanHold) {
    constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
    Floats q(2 * kQSize), kv(2 * kKvSize), out(2 * kQSize);
    AttentionArgs args;
    args.q = view(q, {2, 1, kNumQHeads, kHeadDim});
    args.k = args.v = view(kv, {2, 1, kNumKvHeads, kHeadDim});
    args.out = view(out, {2, 1, kNumQHeads, kHeadDim});
    args.out.strides[0] = int64_t{1} << 62;
    EXPECT_EQ(message_of<ValueError>([&] { attention(args); }),
              "attention: out must lie within 2^62 bytes of memory; got shape [2, 1, 6, 16] and strides "
              "[4611686018427387904, 96, 16, 1]");
    for (int64_t stride : {kLeast, kLeast + 1, -kLeast / 2, int64_t{1} << 60, -(int64_t{1} << 60)}) {
        args.out.strides[0] = stride;
        EXPECT_THROW(attention(args), ValueError) << stride;
    }
    // An axis of length one may have any.
    args.out.strides = {kQSize, kLeast, kHeadDim, 1};
    args.k.strides[1] = args.v.strides[1] = kLeast;
    attention(args);

    args.q.shape[0] = -2;
    EXPECT_EQ(message_of<ValueError>([&] { attention(args); }),
              "attention: q must have no negative length; got shape [-2, 1, 6, 16]");
}

// A paged cache as a serving loop keeps it, and beside it each sequence's keys and values in order. The
// operators get tables, lengths and offsets of int32, or of int64.
class PagedCache : public testing::TestWithParam<DType> {
  protected:
    static constexpr int64_t kNumPages = 24, kPageSize = 4;

    struct Written {
        Sequence sequence;
        Floats k, v;  // [length, num_kv_heads, head_dim]
    };

    Floats poisoned() { return Floats(kNumPages * kPageSize * kKvSize, NAN); }
    TensorView pages_view(Floats& pages) {
        return view(pages, {kNumPages, kPageSize, kNumKvHeads, kHeadDim});
    }

    // Each sequence grows by `n` random tokens: extend, copy_pages, append_kv.
    void append(std::vector<Written*> batch, int64_t n) {
        Floats k, v;
        cu_seqlens_ = {0};
        for (Written* written : batch) {
            allocator_.extend(written->sequence, n);
            Floats new_k = random_floats(random_, n * kKvSize), new_v = random_floats(random_, n * kKvSize);
            for (auto [to, from] :
                 {std::pair{&k, &new_k}, {&v, &new_v}, {&written->k, &new_k}, {&written->v, &new_v}}) {
                to->insert(to->end(), from->begin(), from->end());
            }
            cu_seqlens_.push_back(cu_seqlens_.back() + static_cast<int32_t>(n));
        }
        std::vector<PageCopy> copies = allocator_.take_copies();
        num_copies_ += copies.size();
        CopyPagesArgs copy;
        copy.k_pages = pages_view(k_pages_);
        copy.v_pages = pages_view(v_pages_);
        copy.copies = TensorView(copies.data(), DType::int32, {static_cast<int64_t>(copies.size()), 2});
        copy_pages(copy);

        write_page_table(batch);
        AppendKvArgs args;
        int64_t total = cu_seqlens_.back();
        args.k = view(k, {total, kNumKvHeads, kHeadDim});
        args.v = view(v, {total, kNumKvHeads, kHeadDim});
        args.k_pages = pages_view(k_pages_);
        args.v_pages = pages_view(v_pages_);
        args.page_table = page_table_view();
        args.seq_lens = seq_lens_view();
        args.cu_seqlens = integers(cu_seqlens_, wide_cu_seqlens_, 1);
        append_kv(args);
    }

    void expect_decode(std::vector<Written*> batch) {
        int64_t count = static_cast<int64_t>(batch.size());
        Floats q = random_floats(random_, count * kQSize);
        Floats out(q.size(), NAN), lse(static_cast<size_t>(count * kNumQHeads), NAN);
        write_page_table(batch);
        PagedAttentionArgs args;
        args.q = view(q, {count, kNumQHeads, kHeadDim});
        args.k_pages = pages_view(k_pages_);
        args.v_pages = pages_view(v_pages_);
        args.page_table = page_table_view();
        args.seq_lens = seq_lens_view();
        args.out = view(out, {count, kNumQHeads, kHeadDim});
        args.lse = view(lse, {count, kNumQHeads});
        paged_attention(args);
        for (int64_t i = 0; i < count; ++i) {
            const Written& written = *batch[static_cast<size_t>(i)];
            expect_attention(&q[i * kQSize], written.k.data(), written.v.data(),
                             allocator_.length(written.sequence), &out[i * kQSize], &lse[i * kNumQHeads]);
        }
    }

    void write_page_table(const std::vector<Written*>& batch) {
        std::vector<Sequence> sequences;
        for (const Written* written : batch) sequences.push_back(written->sequence);
        int64_t count = static_cast<int64_t>(sequences.size());
        int64_t max_pages = allocator_.max_pages(sequences.data(), count);
        page_table_.assign(static_cast<size_t>(count * max_pages), 0);
        seq_lens_.assign(static_cast<size_t>(count), 0);
        allocator_.write_page_table(sequences.data(), count, page_table_.data(), max_pages, seq_lens_.data());
    }

    TensorView page_table_view() {
        return integers(page_table_, wide_page_table_, static_cast<int64_t>(seq_lens_.size()));
    }
    TensorView seq_lens_view() { return integers(seq_lens_, wide_seq_lens_, 1); }
    TensorView integers(std::vector<int32_t>& values, std::vector<int64_t>& wide, int64_t rows) {
        wide.assign(values.begin(), values.end());
        const int64_t columns = static_cast<int64_t>(values.size()) / rows;
        TensorView array = view(values, {rows, columns});
        if (GetParam() == DType::int64) array = TensorView(wide.data(), DType::int64, {rows, columns});
        if (rows > 1 || &values == &page_table_) return array;
        array.ndim = 1;
        array.shape[0] = columns;
        array.strides[0] = 1;
        return array;
    }

    std::mt19937 random_{3};
    PageAllocator allocator_{kNumPages, kPageSize};
    Floats k_pages_ = poisoned(), v_pages_ = poisoned();
    std::vector<int32_t> page_table_, seq_lens_, cu_seqlens_;
    std::vector<int64_t> wide_page_table_, wide_seq_lens_, wide_cu_seqlens_;
    size_t num_copies_ = 0;
};

TEST_P(PagedCache, DecodesForkedTruncatedAndFreedSequences) {
    Written a{allocator_.create(), {}, {}}, b{allocator_.create(), {}, {}};
    append({&a, &b}, 10);
    expect_decode({&a, &b});
    Written c = a, d = a;
    std::vector<Sequence> children = allocator_.fork(a.sequence, 2);
    c.sequence = children[0];
    d.sequence = children[1];
    for (int i = 0; i < 3; ++i) {
        append({&a, &c, &d, &b}, 1);
        expect_decode({&d, &b, &a, &c});
    }
    EXPECT_EQ(num_copies_, 2u);
    allocator_.truncate(c.sequence, 5);
    c.k.resize(5 * kKvSize);
    c.v.resize(5 * kKvSize);
    allocator_.free(b.sequence);
    append({&c}, 9);
    append({&d, &a}, 2);
    expect_decode({&a, &c, &d});
    EXPECT_EQ(num_copies_, 3u);
    allocator_.check_invariants();
}

INSTANTIATE_TEST_SUITE_P(Integers, PagedCache, testing::Values(DType::int32, DType::int64));

TEST(Int64, WhatIsUsedIsCheckedWhole) {
    Floats q(2 * kQSize), pages(3 * 4 * kKvSize), out(q.size());
    constexpr int64_t kHuge = int64_t{1} << 32;  // whose lower half is 0
    int64_t table[] = {0, kHuge, 1, kHuge}, lengths[] = {3, 4}, begins[] = {0, 1, 2};
    PagedAttentionArgs args;
    args.q = view(q, {2, kNumQHeads, kHeadDim});
    args.out = view(out, {2, kNumQHeads, kHeadDim});
    args.k_pages = args.v_pages = view(pages, {3, 4, kNumKvHeads, kHeadDim});
    args.page_table = TensorView(table, DType::int64, {2, 2});
    args.seq_lens = TensorView(lengths, DType::int64, {2});
    args.cu_seqlens_q = TensorView(begins, DType::int64, {3});
    auto refused = [&] { return message_of<ValueError>([&] { paged_attention(args); }); };
    EXPECT_NO_THROW(paged_attention(args));  // nobody reads what is huge
    lengths[1] = 5;
    EXPECT_EQ(refused(), "paged_attention: page_table[1, 1] must lie in [0, num_pages = 3); got 4294967296");
    EXPECT_THROW(check_page_table(args.page_table, args.seq_lens, 3, 4), ValueError);
    lengths[1] = kHuge + 4;
    EXPECT_EQ(refused(),
              "paged_attention: seq_lens[1] must lie in [0, max_pages * page_size = 8]; got 4294967300");
    lengths[1] = 4;
    begins[2] = kHuge + 2;
    EXPECT_EQ(
        refused(),
        "paged_attention: cu_seqlens_q[2] must be at most the number of packed rows (2); got 4294967298");
    begins[2] = 2;
    int64_t prefixes[] = {0, kHuge};
    args.prefix_lens = TensorView(prefixes, DType::int64, {2});
    EXPECT_EQ(refused(), "paged_attention: prefix_lens[1] must be below 2^31; got 4294967296");
}

TEST(ScoreTransform, TanhOfSmallNumbersIsTanh) {
    for (int i = -1000; i <= 1000; ++i) {
        const float x = ScoreTransform::kSmall * static_cast<float>(i) / 1000.0f;
        EXPECT_NEAR(ScoreTransform::tanh_of_small(x), std::tanh(x), 0x1p-18) << x;
        EXPECT_NEAR(ScoreTransform::tanh(x), std::tanh(x), 0x1p-22) << x;
    }
}

// The known answers of the authors' Random123 library.
TEST(Dropout, PhiloxGivesThePublishedNumbers) {
    auto expect_words = [](const Philox& random, std::vector<uint32_t> words) {
        EXPECT_EQ(std::vector<uint32_t>(random.words, random.words + 4), words);
    };
    expect_words(Philox::make(0, 0, 0, 0), {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48});
    expect_words(Philox::make(~0u, ~0u, ~0ull, ~0ull), {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662});
    expect_words(Philox::make(0x243f6a88, 0x85a308d3, 0x0370734413198a2e, 0x299f31d0a4093822),
                 {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a});
}

}  // namespace
}  // namespace octavo
