// The unified maximum (softmax_phi) of the decode kernels, against the CPU without it: scores just inside of
// its window, just outside and far outside, of one head among others that stay near it.
#include "paged_call.h"

#include <octavo/paged_attention.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace octavo {
namespace {

constexpr float kQSize = 8.0f, kScale = 1.0f / 8.0f, kLog2 = 0.6931472f, kFar = 1e4f;

// The score of the odd head for key `position` of `length`, less phi, in units of log2(e).
using Offset = std::function<float(int32_t position, int32_t length)>;

struct Profile {
    std::string name;
    Offset offset;
};

Profile one_key(float offset, int32_t place, int32_t of) {
    return {std::to_string(offset) + " at " + std::to_string(place) + "/" + std::to_string(of),
            [=](int32_t position, int32_t length) {
                return position == int64_t{length - 1} * place / of ? offset : 0.0f;
            }};
}

Profile all_keys(float offset) {
    return {"all " + std::to_string(offset), [=](int32_t, int32_t) { return offset; }};
}

// Runs of keys, each with an offset of its own.
Profile steps(const std::string& name, std::vector<float> levels) {
    return {name, [=](int32_t position, int32_t length) {
                return levels[int64_t{position} * static_cast<int64_t>(levels.size()) / length];
            }};
}

// `far`: of scores that no window holds. Scores of 1e4 are off by 1e-3 in float32, which few keys show.
std::vector<Profile> profiles(float far = 1e3f) {
    std::vector<Profile> all;
    for (const float offset : {7.9f, 8.1f, 59.9f, 60.1f, far}) {
        for (const int32_t place : {0, 2, 3, 4}) all.push_back(one_key(offset, place, 4));
    }
    for (const float offset : {-1.9f, -2.1f, -50.0f, -59.9f, -60.1f, -far, far})
        all.push_back(all_keys(offset));
    all.push_back(steps("rising", {-far, -100, -50, -5, 0, 9, 30, 61, 70, 300}));
    all.push_back(steps("falling", {300, 61, 9, 0, -5, -100}));
    all.push_back(steps("in and out", {-100, 5, -100, 20, 0}));
    return all;
}

struct Shape {
    int64_t num_kv_heads, group_size, head_dim, page_size;
    int32_t seqlen_q = 1;
};

constexpr Shape kShapes[] = {{2, 8, 128, 16}, {8, 4, 64, 16}, {1, 16, 128, 24},   {3, 1, 64, 1},
                             {2, 8, 256, 16}, {2, 5, 96, 16}, {2, 4, 128, 16, 2}, {40, 2, 80, 64}};

// Queries and keys whose scores are near `phi` but for those of one head.
struct Problem {
    Problem(unsigned seed, const Shape& shape, const std::vector<int32_t>& lengths, const Profile& profile,
            float phi)
        : random(seed),
          dtype(random.pick({DType::float16, DType::bfloat16})),
          odd_head(static_cast<int64_t>(seed * 5 % (shape.num_kv_heads * shape.group_size))),
          call(random, cache(shape, at_least(lengths, shape.seqlen_q), profile, phi), shape.seqlen_q,
               shape.num_kv_heads * shape.group_size, dtype) {
        std::vector<uint16_t> q = call.q.host;
        for (size_t i = 0; i < q.size(); ++i) {
            const int64_t dim = i % shape.head_dim, in_group = i / shape.head_dim % shape.group_size;
            float value = 0.02f * from_bits(q[i], dtype);
            if (dim < shape.group_size) value = dim == in_group ? kQSize : 0.0f;
            q[i] = to_bits(value, dtype);
        }
        call.q.set(q);
        call.options.softmax_scale = kScale;
        call.options.causal = !random.one_in(4);
        if (random.one_in(5)) call.options.softcap = 30.0;
        call.with_alibi = random.one_in(5);
        if (random.one_in(5)) call.options.window_left = random.pick({10, 90, 300});
        if (random.one_in(8)) call.pick_prefix_lens(random);
    }

    Cache cache(const Shape& shape, const std::vector<int32_t>& lengths, const Profile& profile, float phi) {
        Cache cache(random, lengths, shape.page_size, shape.num_kv_heads, shape.head_dim, dtype);
        cache.widen(cache.max_pages + random.pick({0, 200}));
        for (int64_t b = 0; b < cache.batch; ++b) {
            const int32_t length = cache.lengths[b];
            for (int32_t position = 0; position < length; ++position) {
                const int64_t page = cache.table[b * cache.max_pages + position / shape.page_size];
                const int64_t slot = page * shape.page_size + position % shape.page_size;
                for (int64_t head = 0; head < shape.num_kv_heads * shape.group_size; ++head) {
                    const int64_t row = slot * shape.num_kv_heads + head / shape.group_size;
                    const float offset = head == odd_head ? profile.offset(position, length) : 0.0f;
                    cache.k[row * shape.head_dim + head % shape.group_size] =
                        to_bits(phi + kLog2 * offset, dtype);
                }
            }
        }
        return cache;
    }

    Random random;
    const DType dtype;
    const int64_t odd_head;
    PagedCall call;
};

// In every way of decoding what the CPU gave without softmax_phi.
void expect_right(PagedCall& call) {
    for (const DecodeWay& way : kDecodeWays) {
        SCOPED_TRACE(way.name);
        call.expect_right(way.run);
        if (::testing::Test::HasFatalFailure()) return;
    }
}

void expect_right_with_any_phi(Problem& problem, float phi) {
    PagedCall& call = problem.call;
    call.run_on_cpu();
    for (const float given : {phi, problem.random.pick({phi + 3.0f, kFar, -kFar, 3e38f})}) {
        call.options.softmax_phi = given;
        expect_right(call);
        if (::testing::Test::HasFatalFailure()) return;
    }
    call.options.softmax_phi.reset();
    // One that is far from the scores of its head, or no number, which a GPU takes for none.
    std::vector<float> phi_of_heads(call.num_q_heads, phi);
    phi_of_heads[(problem.odd_head + 1) % call.num_q_heads] =
        problem.random.pick({kFar, -kFar, NAN, std::numeric_limits<float>::infinity()});
    call.phi_of_heads.emplace(phi_of_heads);
    expect_right(call);
}

class CudaSoftmaxPhiTest : public ::testing::TestWithParam<size_t> {
  protected:
    // `body(problem, phi)`, over all profiles, on a small scale over one in sixteen.
    template <class Body>
    static void for_each_problem(const std::vector<std::vector<int32_t>>& batches, Body body) {
        unsigned seed = 100 * GetParam();
        Shape shape = kShapes[GetParam()];
        shape.num_kv_heads = scaled_heads(shape.num_kv_heads);
        for (const Profile& profile : profiles()) {
            const float phi = seed % 2 == 0 ? 0.0f : 4.5f;
            const std::vector<int32_t> lengths =
                scaled_batch(batches[seed % batches.size()], kShapes[GetParam()].num_kv_heads);
            const unsigned own_seed = seed++;
            if (is_small_scale() && own_seed % 16 != GetParam()) continue;
            Problem problem(own_seed, shape, lengths, profile, phi);
            SCOPED_TRACE(profile.name);
            body(problem, phi);
            if (HasFatalFailure()) return;
        }
    }
};

TEST_P(CudaSoftmaxPhiTest, AgreesWithTheCpu) {
    for_each_problem({{600}, {1049, 17, 0, 300}, {33, 1, 129}},
                     [](Problem& problem, float phi) { expect_right_with_any_phi(problem, phi); });
}

TEST_P(CudaSoftmaxPhiTest, AgreesWithTheCpuOnManySequences) {
    std::vector<int32_t> lengths(60);
    for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = static_cast<int32_t>(i * 37 % 257);
    for_each_problem({lengths}, [](Problem& problem, float phi) {
        problem.call.run_on_cpu();
        problem.call.options.softmax_phi = phi;
        expect_right(problem.call);
    });
}

TEST_P(CudaSoftmaxPhiTest, BatchInvariantBitsAreThoseOfASequenceAlone) {
    for_each_problem({{1049, 17, 0, 300, 5, 2200}}, [](Problem& problem, float phi) {
        problem.call.options.batch_invariant = true;
        problem.call.options.softmax_phi = phi;
        problem.call.expect_the_same_alone();
    });
}

// Where no row is near it, a call has the bits that it has without.
TEST_P(CudaSoftmaxPhiTest, FarFromAllScoresItChangesNoBit) {
    for_each_problem({{600}, {1049, 17, 0, 300}}, [](Problem& problem, float) {
        PagedCall& call = problem.call;
        call.options.softcap = 0.0;
        call.run_on_gpu();
        const PagedCall::Results plain = call.fetch();
        for (const float far : {-2.0f * kFar, 2.0f * kFar}) {
            call.options.softmax_phi = far;
            call.run_on_gpu();
            ASSERT_TRUE(call.fetch() == plain) << call.name();
        }
    });
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaSoftmaxPhiTest, ::testing::Range(size_t{0}, std::size(kShapes)));

// A number and an array of it have the same bits, and other kernels than those for decoding take both.
TEST(CudaSoftmaxPhi, OfPrefillAndAsAnArray) {
    unsigned seed = 7000;
    for (const Profile& profile : profiles(kFar)) {
        for (const int32_t seqlen_q : {1, 2, 40, 130}) {
            const Shape shape{2, 8, 128, 16, seqlen_q};
            Problem problem(seed++, shape, {600, 150, 0, 277}, profile, 2.0f);
            PagedCall& call = problem.call;
            call.run_on_cpu();
            call.options.softmax_phi = 2.0;
            call.run_on_gpu();
            call.expect_what_the_cpu_gave();
            const PagedCall::Results number = call.fetch();
            call.options.softmax_phi.reset();
            call.phi_of_heads.emplace(std::vector<float>(call.num_q_heads, 2.0f));
            call.run_on_gpu();
            ASSERT_TRUE(call.fetch() == number) << call.name();
        }
    }
}

}  // namespace
}  // namespace octavo
