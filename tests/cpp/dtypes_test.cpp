// The dtypes: how large their elements are, and which type holds them.
#include "cpu/with_type.h"

#include <octavo/tensor.h>

#include <gtest/gtest.h>

#include <type_traits>

namespace octavo {
namespace {

TEST(DTypes, EachHasASize) {
    static_assert(size_of(DType::float32) == 4 && size_of(DType::int32) == 4);
    static_assert(size_of(DType::float16) == 2 && size_of(DType::bfloat16) == 2);
    EXPECT_THROW(size_of(static_cast<DType>(100)), TypeError);
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
    for (DType dtype : {DType::int32, static_cast<DType>(100)}) {
        EXPECT_THROW(cpu::with_type(dtype, [](auto) {}), TypeError);
    }
}

}  // namespace
}  // namespace octavo
