// The dtypes: how large their elements are, and which of them a call reads its arrays as.
#include "checks/checks.h"
#include "cpu/backend.h"
#include "cpu/with_type.h"

#include <octavo/attention.h>
#include <octavo/paged_attention.h>
#include <octavo/tensor.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

namespace octavo {
namespace {

constexpr DType kFloats[] = {DType::float32, DType::float16, DType::bfloat16};

TEST(DTypes, EachHasASize) {
    static_assert(size_of(DType::float32) == 4 && size_of(DType::int32) == 4);
    static_assert(size_of(DType::float16) == 2 && size_of(DType::bfloat16) == 2);
    static_assert(size_of(DType::int8) == 1);
    static_assert(size_of(DType::float8_e4m3fn) == 1 && size_of(DType::float8_e5m2) == 1);
    EXPECT_THROW(size_of(static_cast<DType>(100)), TypeError);
    std::set<std::string> names;
    for (DType dtype : kDTypes) names.insert(to_string(dtype));
    EXPECT_EQ(names.size(), std::size(kDTypes)) << "each has a name of its own";
}

TEST(DTypes, SizesAreCountedAsFarAsTheyGo) {
    constexpr int64_t kLarge = int64_t{1} << 62;
    float x = 0;
    EXPECT_THROW(TensorView(&x, DType::float32, {kLarge, kLarge, 4}), ValueError);
    TensorView view(&x, DType::float32, {kLarge, 1});
    EXPECT_EQ(view.size(), kLarge);
    view.shape = {kLarge, kLarge};
    EXPECT_EQ(view.size(), std::numeric_limits<int64_t>::max());
    view.ndim = 3;
    view.shape = {kLarge, kLarge, 0};
    EXPECT_EQ(view.size(), 0);
}

TEST(DTypes, EachFloatHasATypeOnTheCpu) {
    auto is = [](DType dtype, auto expected) {
        bool same = false;
        cpu::with_type(dtype, [&](auto type) { same = std::is_same_v<decltype(type), decltype(expected)>; });
        return same;
    };
    EXPECT_TRUE(is(DType::float32, float{}));
    EXPECT_TRUE(is(DType::float16, cpu::Float16{}));
    EXPECT_TRUE(is(DType::bfloat16, cpu::BFloat16{}));
    for (DType dtype : {DType::int32, DType::int8, static_cast<DType>(100)}) {
        EXPECT_THROW(cpu::with_type(dtype, [](auto) {}), TypeError);
    }
}

TEST(DTypes, EachOfACacheHasATypeOnTheCpu) {
    auto is = [](DType dtype, auto expected) {
        bool same = false;
        cpu::with_cache_type(dtype,
                             [&](auto type) { same = std::is_same_v<decltype(type), decltype(expected)>; });
        return same;
    };
    EXPECT_TRUE(is(DType::float16, cpu::Float16{}));
    EXPECT_TRUE(is(DType::int8, cpu::Int8{}));
    EXPECT_TRUE(is(DType::float8_e4m3fn, cpu::Float8E4m3{}));
    EXPECT_TRUE(is(DType::float8_e5m2, cpu::Float8E5m2{}));
    EXPECT_THROW(cpu::with_cache_type(DType::int32, [](auto) {}), TypeError);
}

template <class Format>
void expect_every_code_back() {
    for (int code = 0; code < 256; ++code) {
        const float x = float8_to_float<Format>(static_cast<uint8_t>(code));
        if (std::isfinite(x)) {
            EXPECT_EQ(to_float8<Format>(x), code);
        } else if (std::isnan(x)) {
            EXPECT_EQ(to_float8<Format>(x) & 0x7f, 0x7f);
        } else {
            EXPECT_EQ(to_float8<Format>(x) & 0x7f, Format::kMaxCode) << "infinity is bounded";
        }
    }
}

TEST(DTypes, EveryFloat8ComesBack) {
    expect_every_code_back<E4m3>();
    expect_every_code_back<E5m2>();
}

// An array that owns its elements, all of which are small numbers that every dtype can hold.
class Array {
  public:
    Array(DType dtype, std::initializer_list<int64_t> shape)
        : view_(nullptr, dtype, shape), bytes_(static_cast<size_t>(view_.size() * size_of(dtype))) {
        view_.data = bytes_.data();
    }

    void fill(unsigned seed) {
        std::mt19937 random(seed);
        std::uniform_int_distribution<int> eighths(-16, 16);
        cpu::with_type(view_.dtype, [&](auto element) {
            for (size_t i = 0; i < bytes_.size(); i += sizeof(element)) {
                cpu::from_float(static_cast<float>(eighths(random)) / 8.0f, element);
                std::memcpy(bytes_.data() + i, &element, sizeof(element));
            }
        });
    }

    const TensorView& view() const { return view_; }
    const std::vector<char>& bytes() const { return bytes_; }

  private:
    TensorView view_;
    std::vector<char> bytes_;
};

constexpr int64_t kQueries = 5, kKeys = 70, kHeadDim = 24;  // two tiles of keys, and part of a vector

// The result over keys and values of `kv_dtype`. The checks let pass only that of the queries; what is behind
// them is called here as they would call it.
std::vector<char> attend(DType dtype, DType kv_dtype) {
    Array q(dtype, {1, kQueries, 2, kHeadDim}), out(dtype, {1, kQueries, 2, kHeadDim});
    Array like_q(dtype, {1, kKeys, 1, kHeadDim});
    Array k(kv_dtype, {1, kKeys, 1, kHeadDim}), v(kv_dtype, {1, kKeys, 1, kHeadDim});
    q.fill(1);
    k.fill(2);
    v.fill(3);
    AttentionArgs args;
    args.q = q.view();
    args.k = args.v = like_q.view();
    args.out = out.view();
    AttentionParams params = check_attention(args);
    EXPECT_EQ(params.k_dtype, dtype);
    params.k = k.view().data;
    params.v = v.view().data;
    params.k_dtype = params.v_dtype = kv_dtype;
    cpu::attention(params);
    return out.bytes();
}

TEST(DTypes, KeysAndValuesAreReadAsTheirOwn) {
    for (DType dtype : kFloats) {
        const std::vector<char> expected = attend(dtype, dtype);
        EXPECT_NE(expected, std::vector<char>(expected.size()));
        for (DType kv_dtype : kFloats) {
            EXPECT_EQ(attend(dtype, kv_dtype), expected) << to_string(dtype) << " " << to_string(kv_dtype);
        }
    }
}

TEST(DTypes, ChecksSayWhichTheKeysHave) {
    for (DType dtype : kFloats) {
        Array q(dtype, {2, 2, kHeadDim}), out(dtype, {2, 2, kHeadDim});
        Array pages(dtype, {4, 16, 1, kHeadDim});
        Array page_table(DType::int32, {2, 1}), seq_lens(DType::int32, {2});
        PagedAttentionArgs args;
        args.q = q.view();
        args.k_pages = args.v_pages = pages.view();
        args.page_table = page_table.view();
        args.seq_lens = seq_lens.view();
        args.out = out.view();
        EXPECT_EQ(check_paged_attention(args).k_dtype, dtype);
    }
}

}  // namespace
}  // namespace octavo
