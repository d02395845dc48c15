// Codes of a cache and the scales of their rows: the formulas, and the C++ face of caches that hold them.
#include "common/codes.h"
#include "checks/checks.h"

#include <octavo/paged_attention.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace octavo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

CodeScale of_row(const std::vector<float>& row, float largest) {
    uint32_t absmax = 0;
    for (float x : row) absmax = std::max(absmax, size_bits(x));
    return code_scale_of_row(absmax, largest);
}

CodeScale int4_of_row(const std::vector<float>& row) {
    int32_t min = order_bits(row[0]), max = min;
    for (float x : row) {
        min = std::min(min, order_bits(x));
        max = std::max(max, order_bits(x));
    }
    return int4_scale_of_row(min, max);
}

TEST(Codes, OrderBitsAreInOrder) {
    const float numbers[] = {-kNan,  -kInfinity, -3.0f,  -std::numeric_limits<float>::denorm_min(),
                             -0.0f,  0.0f,       1e-40f, 1.0f,
                             3.0e4f, kInfinity,  kNan};
    for (size_t i = 0; i + 1 < std::size(numbers); ++i)
        EXPECT_LT(order_bits(numbers[i]), order_bits(numbers[i + 1])) << i;
    for (float x : numbers) EXPECT_EQ(bits_of_float(float_of_order_bits(order_bits(x))), bits_of_float(x));
}

TEST(Codes, TheLargestNumberOfARowHasTheLargestCode) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (int i = 0; i < 1000; ++i) {
        std::vector<float> row(16);
        for (float& x : row) x = normal(random);
        const float absmax = std::fabs(*std::max_element(
            row.begin(), row.end(), [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
        EXPECT_EQ(to_int8(of_row(row, 127.0f)(absmax)), 127);
        EXPECT_EQ(to_float8<E4m3>(of_row(row, E4m3::kMax)(absmax)), E4m3::kMaxCode);
        EXPECT_EQ(to_float8<E5m2>(of_row(row, E5m2::kMax)(absmax)), E5m2::kMaxCode);
        const CodeScale int4 = int4_of_row(row);
        for (float x : row) {
            const float back = int4.minimum + int4.scale * to_int4(int4.above_minimum(x));
            EXPECT_NEAR(back, x, 0.51f * int4.scale);
        }
    }
}

TEST(Codes, RowsThatHaveNoScale) {
    for (float largest : {127.0f, E4m3::kMax, E5m2::kMax}) {
        for (float x : {0.0f, -0.0f, 1e-44f, 1e-36f}) {
            const CodeScale scale = of_row({x, 0.0f}, largest);
            EXPECT_EQ(scale.scale, 1.0f);
            EXPECT_EQ(scale(x), 0.0f);
        }
        for (float x : {kNan, -kNan, kInfinity, -kInfinity}) {
            const CodeScale scale = of_row({1.0f, x}, largest);
            EXPECT_EQ(bits_of_float(scale.scale), kNanBits);
            EXPECT_EQ(to_int8(scale(1.0f)), 0);
            EXPECT_EQ(to_float8<E4m3>(scale(-1.0f)), E4m3::kNan);
        }
        EXPECT_TRUE(std::isfinite(of_row({std::numeric_limits<float>::max()}, largest).inverse));
    }
    for (float x : {0.0f, -0.0f, 1.0f, 2049.0f}) {
        const CodeScale scale = int4_of_row({x, x});
        EXPECT_EQ(scale.scale, 1.0f);
        EXPECT_EQ(to_int4(scale.above_minimum(x)), 0);
        EXPECT_EQ(int4_word(scale) >> 16, float16_of_float(x + 0.0f));
    }
    for (float x : {kNan, -kNan, kInfinity, -kInfinity, 7e4f, -7e4f}) {
        const CodeScale scale = int4_of_row({x, x < 0.0f ? 1.0f : x});
        EXPECT_EQ(int4_word(scale), 0x7e00u) << x;
        EXPECT_EQ(to_int4(scale.above_minimum(x)), 0);
    }
}

TEST(Codes, WordsOfInt4HoldBothNumbers) {
    const CodeScale scale = int4_of_row({-1.5f, 6.0f, 2.0f});
    EXPECT_EQ(scale_of_int4_word(int4_word(scale)), 0.5f);
    EXPECT_EQ(minimum_of_int4_word(int4_word(scale)), -1.5f);
    EXPECT_EQ(to_int4(scale.above_minimum(2.0f)), 7);
    EXPECT_EQ(to_int4(scale.above_minimum(2.25f)), 8) << "ties to even";
}

// A cache of two tokens of one sequence, keys int8 and values int4.
struct SmallCache {
    static constexpr int64_t kPages = 2, kSlots = 2, kHeads = 1, kDim = 8;
    std::vector<int8_t> k_pages = std::vector<int8_t>(kPages * kSlots * kDim);
    std::vector<uint8_t> v_pages = std::vector<uint8_t>(kPages * kSlots * kDim / 2);
    std::vector<float> k_scales = std::vector<float>(kPages * kSlots, kNan);
    std::vector<uint16_t> v_scales = std::vector<uint16_t>(kPages * kSlots * 2, uint16_t{0x7e00});
    int32_t page_table = 1, seq_lens = 2;

    template <class Args>
    void give(Args& args) {
        args.k_pages = {k_pages.data(), DType::int8, {kPages, kSlots, kHeads, kDim}};
        args.v_pages = {v_pages.data(), DType::uint8, {kPages, kSlots, kHeads, kDim / 2}};
        args.k_scales = TensorView(k_scales.data(), DType::float32, {kPages, kSlots, kHeads});
        args.v_scales = TensorView(v_scales.data(), DType::float16, {kPages, kSlots, kHeads, 2});
    }
    template <class Args>
    void give_all(Args& args) {
        give(args);
        args.kv_dtype = DType::int4;
        args.page_table = {&page_table, DType::int32, {1, 1}};
        args.seq_lens = {&seq_lens, DType::int32, {1}};
    }
};

TEST(Codes, AppendAttendCopy) {
    SmallCache cache;
    std::vector<float> k(16), v(16), out(8);
    for (int i = 0; i < 16; ++i) {
        k[i] = i < 8 ? 0.0f : 1.0f;
        v[i] = static_cast<float>(i < 8 ? i : 2 * i);
    }
    int32_t cu_seqlens[] = {0, 2};
    AppendKvArgs append;
    append.k = {k.data(), DType::float32, {2, 1, 8}};
    append.v = {v.data(), DType::float32, {2, 1, 8}};
    append.cu_seqlens = TensorView(cu_seqlens, DType::int32, {2});
    cache.give_all(append);
    append_kv(append);
    EXPECT_EQ(cache.k_scales[2], 1.0f);
    EXPECT_EQ(cache.k_scales[3], 1.0f / 127.0f);
    EXPECT_TRUE(std::isnan(cache.k_scales[0]) && std::isnan(cache.k_scales[1]));
    EXPECT_EQ(cache.v_pages[8], 2 << 4) << "the even dim in the lower half";

    int32_t copies[] = {1, 0};
    CopyPagesArgs copy;
    cache.give(copy);
    copy.copies = {copies, DType::int32, {1, 2}};
    copy_pages(copy);
    EXPECT_EQ(cache.k_scales[1], cache.k_scales[3]);
    cache.page_table = 0;

    std::vector<float> q(8, 100.0f);  // sees the second key alone
    PagedAttentionArgs attend;
    attend.q = {q.data(), DType::float32, {1, 1, 8}};
    attend.out = {out.data(), DType::float32, {1, 1, 8}};
    cache.give_all(attend);
    paged_attention(attend);
    for (int d = 0; d < 8; ++d) EXPECT_NEAR(out[d], v[8 + d], 0.52f * 14.0f / 15.0f);
}

TEST(Codes, StaticScalesHaveNoStrides) {
    SmallCache cache;
    std::vector<float> q(8), out(8);
    float scale = 0.5f;
    PagedAttentionArgs args;
    args.q = {q.data(), DType::float32, {1, 1, 8}};
    args.out = {out.data(), DType::float32, {1, 1, 8}};
    cache.give_all(args);
    args.k_scales.reset();
    args.k_scale_array = TensorView(&scale, DType::float32, {1});
    const AttentionParams p = check_paged_attention(args);
    EXPECT_EQ(p.k_dtype, DType::int8);
    EXPECT_EQ(p.v_dtype, DType::int4);
    EXPECT_EQ(p.head_dim, 8);
    EXPECT_EQ(p.v_token_stride, 4) << "in bytes";
    EXPECT_EQ(p.k_scales.data, &scale);
    EXPECT_EQ(p.k_scales.page_stride, 0);
    EXPECT_EQ(p.k_scales.token_stride, 0);
    EXPECT_EQ(p.k_scales.head_stride, 0);
    EXPECT_EQ(p.v_scales.page_stride, 2) << "in words";
    EXPECT_EQ(p.v_scales.token_stride, 1);
    EXPECT_EQ(p.softmax_scale, 1.0f / std::sqrt(8.0f)) << "without the scale in memory";
}

}  // namespace
}  // namespace octavo
