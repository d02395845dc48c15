// append_kv with a rotary embedding through the public header, on the CPU, against the formula.
#include <octavo/paged_attention.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace octavo {
namespace {

constexpr int64_t kHeadDim = 8, kRotaryDim = 6, kPositions = 7;

struct Tables {
    std::vector<float> cos, sin;
};

Tables make_tables() {
    Tables tables;
    for (int64_t i = 0; i < kPositions * kRotaryDim / 2; ++i) {
        tables.cos.push_back(std::cos(0.3f * static_cast<float>(i)));
        tables.sin.push_back(std::sin(0.3f * static_cast<float>(i)));
    }
    return tables;
}

// One head at a position.
std::vector<float> rotated(std::vector<float> x, const Tables& tables, int64_t position, bool interleaved) {
    constexpr int64_t kHalf = kRotaryDim / 2;
    for (int64_t i = 0; i < kHalf; ++i) {
        const int64_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + kHalf;
        const float a = x[first], b = x[second];
        const float cos = tables.cos[position * kHalf + i], sin = tables.sin[position * kHalf + i];
        x[first] = a * cos - b * sin;
        x[second] = b * cos + a * sin;
    }
    return x;
}

TEST(Rotary, RotatesKeysAndQueries) {
    Tables tables = make_tables();
    for (const bool interleaved : {false, true}) {
        // Two new tokens of a sequence of seven, in pages of four; one KV head, two query heads.
        std::vector<float> k(2 * kHeadDim), v(2 * kHeadDim, 5.0f), q(2 * 2 * kHeadDim), q_out(q.size(), NAN);
        for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(i) - 7.0f;
        for (size_t i = 0; i < q.size(); ++i) q[i] = 3.0f - static_cast<float>(i);
        std::vector<float> k_pages(3 * 4 * kHeadDim, NAN), v_pages(k_pages);
        std::vector<int32_t> page_table{2, 0}, seq_lens{7}, cu_seqlens{0, 2};
        AppendKvArgs args;
        args.k = {k.data(), DType::float32, {2, 1, kHeadDim}};
        args.v = {v.data(), DType::float32, {2, 1, kHeadDim}};
        args.k_pages = {k_pages.data(), DType::float32, {3, 4, 1, kHeadDim}};
        args.v_pages = {v_pages.data(), DType::float32, {3, 4, 1, kHeadDim}};
        args.page_table = {page_table.data(), DType::int32, {1, 2}};
        args.seq_lens = {seq_lens.data(), DType::int32, {1}};
        args.cu_seqlens = TensorView(cu_seqlens.data(), DType::int32, {2});
        args.rotary_cos = TensorView(tables.cos.data(), DType::float32, {kPositions, kRotaryDim / 2});
        args.rotary_sin = TensorView(tables.sin.data(), DType::float32, {kPositions, kRotaryDim / 2});
        args.rotary_interleaved = interleaved;
        args.q = TensorView(q.data(), DType::float32, {2, 2, kHeadDim});
        args.q_out = TensorView(q_out.data(), DType::float32, {2, 2, kHeadDim});
        append_kv(args);
        auto expect_row = [&](const std::vector<float>& rows, int64_t at, const std::vector<float>& from,
                              int64_t row, int64_t position) {
            const auto begin = from.begin() + row * kHeadDim;
            const std::vector<float> wanted =
                rotated({begin, begin + kHeadDim}, tables, position, interleaved);
            for (int64_t d = 0; d < kHeadDim; ++d)
                EXPECT_NEAR(rows[at * kHeadDim + d], wanted[d], 1e-5f) << at << ", " << d;
        };
        for (int64_t token = 0; token < 2; ++token) {
            expect_row(k_pages, 1 + token, k, token, 5 + token);  // slots 1 and 2 of page 0
            for (int64_t head = 0; head < 2; ++head)
                expect_row(q_out, 2 * token + head, q, 2 * token + head, 5 + token);
            EXPECT_EQ(v_pages[(1 + token) * kHeadDim], 5.0f);
        }
        EXPECT_TRUE(std::isnan(k_pages[0]) && std::isnan(k_pages[3 * kHeadDim]));
        seq_lens[0] = 8;  // whose last position is past the tables
        EXPECT_THROW(append_kv(args), ValueError);
        EXPECT_NO_THROW(check_page_table(*args.page_table, *args.seq_lens, 3, 4));
        EXPECT_THROW(check_page_table(*args.page_table, *args.seq_lens, 3, 4, nullptr, kPositions),
                     ValueError);
    }
}

}  // namespace
}  // namespace octavo
