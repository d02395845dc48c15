// The gradients of attention through the public C++ headers, on the CPU, in float32. The Python tests cover
// the rest.
#include "allocator_testing.h"
#include "common/query_range.h"
#include "host_arrays.h"

#include <octavo/attention.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

namespace octavo {
namespace {

constexpr int64_t kSeqlenQ = 5, kSeqlenK = 7, kNumQHeads = 4, kNumKvHeads = 2, kHeadDim = 8;
constexpr double kSoftcap = 2.0, kScale = 0.6;
constexpr int64_t kWindowLeft = 3;

using Doubles = std::vector<double>;

Doubles random_numbers(std::mt19937& random, int64_t size) {
    std::normal_distribution<float> normal;
    Doubles values(static_cast<size_t>(size));
    for (double& value : values) value = normal(random);
    return values;
}

Floats to_floats(const Doubles& values) { return Floats(values.begin(), values.end()); }

// One causal sequence with a window, a softcap and slopes, and the loss sum(out * dout) + sum(lse * dlse).
struct Problem {
    std::mt19937 random{7};
    Doubles q = random_numbers(random, kSeqlenQ * kNumQHeads * kHeadDim);
    Doubles k = random_numbers(random, kSeqlenK * kNumKvHeads * kHeadDim);
    Doubles v = random_numbers(random, kSeqlenK * kNumKvHeads * kHeadDim);
    Doubles slopes = random_numbers(random, kNumQHeads);
    Doubles dout = random_numbers(random, kSeqlenQ * kNumQHeads * kHeadDim);
    Doubles dlse = random_numbers(random, kSeqlenQ* kNumQHeads);

    double loss() const {
        double sum = 0;
        for (int64_t i = 0; i < kSeqlenQ; ++i) {
            for (int64_t head = 0; head < kNumQHeads; ++head) sum += loss_of(i, head);
        }
        return sum;
    }

    double loss_of(int64_t i, int64_t head) const {
        const int64_t row = i * kNumQHeads + head, q_pos = kSeqlenK - kSeqlenQ + i;
        auto key = [&](int64_t j) { return (j * kNumKvHeads + head * kNumKvHeads / kNumQHeads) * kHeadDim; };
        double sum = 0, weighted = 0;
        for (int64_t j = std::max<int64_t>(0, q_pos - kWindowLeft); j <= q_pos; ++j) {
            double score = 0, product = 0;
            for (int64_t d = 0; d < kHeadDim; ++d) {
                score += kScale * q[row * kHeadDim + d] * k[key(j) + d];
                product += dout[row * kHeadDim + d] * v[key(j) + d];
            }
            score = kSoftcap * std::tanh(score / kSoftcap) - slopes[head] * static_cast<double>(q_pos - j);
            sum += std::exp(score);
            weighted += std::exp(score) * product;
        }
        return weighted / sum + std::log(sum) * dlse[row];
    }

    // The derivative of the loss with respect to one of its own numbers.
    double derivative(double& number) const {
        constexpr double kStep = 1e-5;
        const double kept = number;
        number = kept + kStep;
        const double above = loss();
        number = kept - kStep;
        const double below = loss();
        number = kept;
        return (above - below) / (2 * kStep);
    }
};

// What a call of both operators needs.
struct Call {
    Floats q, k, v, slopes, dout, dlse;
    Floats out, lse, dq, dk, dv, dslopes;
    AttentionBackwardArgs args;

    explicit Call(const Problem& problem)
        : q(to_floats(problem.q)),
          k(to_floats(problem.k)),
          v(to_floats(problem.v)),
          slopes(to_floats(problem.slopes)),
          dout(to_floats(problem.dout)),
          dlse(to_floats(problem.dlse)),
          out(q.size(), NAN),
          lse(dlse.size(), NAN),
          dq(q.size(), NAN),
          dk(k.size(), NAN),
          dv(v.size(), NAN),
          dslopes(slopes.size(), NAN) {
        AttentionArgs forward;
        args.q = forward.q = like_q(q);
        args.k = forward.k = like_k(k);
        args.v = forward.v = like_k(v);
        args.out = forward.out = like_q(out);
        args.lse = view(lse, {1, kSeqlenQ, kNumQHeads});
        forward.lse = args.lse;
        args.alibi_slopes = forward.alibi_slopes = view(slopes, {kNumQHeads});
        args.causal = forward.causal = true;
        args.window_left = forward.window_left = kWindowLeft;
        args.softcap = forward.softcap = kSoftcap;
        args.softmax_scale = forward.softmax_scale = kScale;
        attention(forward);
        args.dout = like_q(dout);
        args.dlse = view(dlse, {1, kSeqlenQ, kNumQHeads});
        args.dq = like_q(dq);
        args.dk = like_k(dk);
        args.dv = like_k(dv);
        args.dalibi_slopes = view(dslopes, {kNumQHeads});
    }

    static TensorView like_q(Floats& values) { return view(values, {1, kSeqlenQ, kNumQHeads, kHeadDim}); }
    static TensorView like_k(Floats& values) { return view(values, {1, kSeqlenK, kNumKvHeads, kHeadDim}); }
};

TEST(AttentionBackward, GradientsAreThoseOfDifferences) {
    Problem problem;
    Call call(problem);
    attention_backward(call.args);
    for (const auto& [numbers, gradients] : {std::pair{&problem.q, &call.dq},
                                             {&problem.k, &call.dk},
                                             {&problem.v, &call.dv},
                                             {&problem.slopes, &call.dslopes}}) {
        ASSERT_EQ(numbers->size(), gradients->size());
        for (size_t i = 0; i < numbers->size(); ++i)
            ASSERT_NEAR((*gradients)[i], problem.derivative((*numbers)[i]), 5e-6);
    }
}

// The sink takes its part of every query's weights, and nothing else is said of it.
TEST(AttentionBackward, GradientsOfSinksAreThoseOfDifferences) {
    Floats q(3 * 2 * 8), k(5 * 8), v(5 * 8), out(q.size()), lse(3 * 2), dout(q.size()), dlse(lse.size());
    Floats dq(q.size()), dk(k.size()), dv(v.size()), sinks{0.75f, -1.0f}, dsinks(2, NAN);
    std::mt19937 random(1);
    for (Floats* values : {&q, &k, &v, &dout, &dlse}) *values = random_floats(random, values->size());
    auto of_queries = [](Floats& x) { return view(x, {1, 3, 2, 8}); };
    auto of_keys = [](Floats& x) { return view(x, {1, 5, 1, 8}); };
    auto set = [&](auto& args) {
        args.q = of_queries(q);
        args.k = of_keys(k);
        args.v = of_keys(v);
        args.out = of_queries(out);
        args.lse = view(lse, {1, 3, 2});
        args.sinks = view(sinks, {2});
    };
    auto loss = [&] {
        AttentionArgs args;
        set(args);
        attention(args);
        double sum = 0.0;
        for (size_t i = 0; i < out.size(); ++i) sum += double{out[i]} * dout[i];
        for (size_t i = 0; i < lse.size(); ++i) sum += double{lse[i]} * dlse[i];
        return sum;
    };
    loss();
    AttentionBackwardArgs args;
    set(args);
    args.dout = of_queries(dout);
    args.dlse = view(dlse, {1, 3, 2});
    args.dq = of_queries(dq);
    args.dk = of_keys(dk);
    args.dv = of_keys(dv);
    args.dsinks = view(dsinks, {2});
    attention_backward(args);
    for (size_t h = 0; h < sinks.size(); ++h) {
        constexpr float kStep = 1.0f / 64;
        const float sink = sinks[h];
        sinks[h] = sink + kStep;
        const double above = loss();
        sinks[h] = sink - kStep;
        const double below = loss();
        sinks[h] = sink;
        EXPECT_NEAR(dsinks[h], (above - below) / (2 * kStep), 2e-4);
    }
    args.sinks.reset();
    try {
        attention_backward(args);
        FAIL() << "took no sinks for their gradient";
    } catch (const ValueError& error) {
        EXPECT_STREQ(error.what(), "attention_backward: dsinks (return_dsinks) needs sinks; got none");
    }
}

TEST(AttentionBackward, GradientsMayBeViewsOfOneArray) {
    Problem problem;
    Call call(problem);
    attention_backward(call.args);
    // As of one projection to q, k and v: [batch, tokens, heads of all three, head_dim], k and v reversed.
    constexpr int64_t kHeads = kNumQHeads + 2 * kNumKvHeads;
    Floats whole(kSeqlenK * kHeads * kHeadDim, NAN);
    auto take = [&](TensorView like, int64_t first_head) {
        like.data = &whole[first_head * kHeadDim];
        like.strides = {0, kHeads * kHeadDim, kHeadDim, 1};
        return like;
    };
    call.args.dq = take(call.args.dq, 0);
    call.args.dk = take(call.args.dk, kNumQHeads + kNumKvHeads);
    call.args.dv = take(call.args.dv, kNumQHeads);
    attention_backward(call.args);
    for (int64_t token = 0; token < kSeqlenK; ++token) {
        for (int64_t i = 0; i < kHeads * kHeadDim; ++i) {
            const int64_t of_k = i - kNumQHeads * kHeadDim, size = kNumKvHeads * kHeadDim;
            const float found = whole[token * kHeads * kHeadDim + i];
            if (of_k < 0) {
                if (token < kSeqlenQ) {
                    EXPECT_EQ(found, call.dq[token * kNumQHeads * kHeadDim + i]);
                } else {
                    EXPECT_TRUE(std::isnan(found));
                }
            } else {
                EXPECT_EQ(found,
                          of_k < size ? call.dv[token * size + of_k] : call.dk[token * size + of_k - size]);
            }
        }
    }
}

TEST(AttentionBackward, RefusesWhatItCannotTake) {
    Problem problem;
    Call call(problem);
    auto message = [&](auto change) {
        AttentionBackwardArgs args = call.args;
        change(args);
        return message_of<ValueError>([&] { attention_backward(args); });
    };
    EXPECT_EQ(message([](auto& args) { args.alibi_slopes.reset(); }),
              "attention_backward: dalibi_slopes (return_dalibi) needs alibi_slopes; got none");
    EXPECT_EQ(
        message([](auto& args) { args.dk = args.dv; }),
        "attention_backward: dv must not share elements with dk; both may be views of one array, but not "
        "of the same part");
    EXPECT_EQ(message([](auto& args) { args.dq = args.dout; }),
              "attention_backward: dq must not overlap dout in memory");
    EXPECT_EQ(message([](auto& args) { args.dropout_p = 0.5; }),
              "attention_backward: dropout_p (0.5) needs a dropout_seed; got none");
    Floats slopes(2 * kNumQHeads, 1.0f), gradient(4 * kNumQHeads);
    EXPECT_EQ(message([&](auto& args) {
                  args.q = args.dq = args.out = args.dout = view(call.q, {2, 1, 4, kHeadDim});
                  args.k = args.dk = args.v = args.dv = view(call.k, {2, 3, 2, kHeadDim});
                  args.lse = view(call.lse, {2, 1, 4});
                  args.dlse.reset();
                  args.alibi_slopes = view(slopes, {2, 4});
                  args.dalibi_slopes = view(gradient, {2, 4});
                  args.dalibi_slopes->strides[0] = 8;
              }),
              "attention_backward: dalibi_slopes must be in C order; got strides [8, 1]");
}

TEST(Visibility, QueryRangeHasWhoSeesATile) {
    std::mt19937 random(3);
    auto below = [&](int n) { return static_cast<int32_t>(random() % static_cast<unsigned>(n)); };
    for (int round = 0; round < 3000; ++round) {
        const int32_t seqlen_q = below(40), seqlen_k = 1 + below(40);
        Visibility see{seqlen_k, below(3) ? 0 : below(seqlen_k + 1), below(2) ? -1 : below(50),
                       below(2) ? -1 : below(50), FastDivide{}};
        if (below(3) == 0) {
            const int32_t chunk = 1 + below(50);
            see.attention_chunk = FastDivide::by(chunk);
            see.window_left = below(2) ? chunk - 1 : below(chunk);
            see.window_right = 0;
        }
        const int32_t k_begin = below(seqlen_k), k_end = k_begin + 1 + below(seqlen_k - k_begin);
        const QueryRange range(see, seqlen_q, k_begin, k_end);
        const QueryRange all = QueryRange::that_see_all(see, seqlen_q, k_begin, k_end);
        int32_t first = seqlen_q, end = 0;
        for (int32_t i = 0; i < seqlen_q; ++i) {
            bool sees_all = true;
            for (int32_t key = k_begin; key < k_end; ++key) {
                const bool sees = see.visible(seqlen_k - seqlen_q + i, key);
                sees_all = sees_all && sees;
                if (!sees) continue;
                first = std::min(first, i);
                end = i + 1;
            }
            // A run that ends within the prefix and one behind it are told apart by no query.
            if (k_begin >= see.prefix_len || k_end <= see.prefix_len) {
                ASSERT_EQ(i >= all.begin && i < all.end, sees_all) << i;
            } else if (i >= all.begin && i < all.end) {
                ASSERT_TRUE(sees_all) << i;
            }
        }
        const QueryRange behind = QueryRange::that_see_all(see, seqlen_q, k_begin, seqlen_k + 1);
        ASSERT_GE(behind.begin, behind.end);
        if (first >= end) continue;  // no query sees any
        ASSERT_EQ(range.begin, first);
        ASSERT_EQ(range.end, end);
    }
}

// Kernels ask who sees a key, and not for each score.
TEST(Visibility, QueryRangeOfOneKeyIsExact) {
    for (const Visibility& see :
         {Visibility{90, 0, -1, -1, {}}, Visibility{90, 0, -1, 0, {}}, Visibility{90, 0, 7, 3, {}},
          Visibility{90, 20, 7, 0, {}}, Visibility{90, 0, 15, 0, FastDivide::by(16)}}) {
        for (int32_t seqlen_q : {40, 90, 130}) {
            for (int32_t key = 0; key < see.seqlen_k; ++key) {
                const QueryRange queries(see, seqlen_q, key, key + 1);
                for (int32_t query = 0; query < seqlen_q; ++query) {
                    EXPECT_EQ(query >= queries.begin && query < queries.end,
                              see.visible(see.seqlen_k - seqlen_q + query, key))
                        << key << ", " << query << " of " << seqlen_q << ", window " << see.window_left;
                }
            }
        }
    }
}

}  // namespace
}  // namespace octavo
