// The codes that a cache may hold, as types of their own, and to and from float32.
#pragma once

#include "common/codes.h"

#include <cstdint>

namespace octavo::cpu {

struct Int8 {
    int8_t code;
};
struct Float8E4m3 {
    using Format = E4m3;
    uint8_t code;
};
struct Float8E5m2 {
    using Format = E5m2;
    uint8_t code;
};
// Two numbers from 0 to 15, that of the even index in the lower half.
struct Int4Pair {
    uint8_t pair;
};

// How many numbers an element of an array holds.
template <class T>
constexpr int kNumbersOf = 1;
template <>
inline constexpr int kNumbersOf<Int4Pair> = 2;

template <class T>
constexpr bool kIsCode = sizeof(T) == 1;

inline float to_float(Int8 x) { return x.code; }
inline float to_float(Float8E4m3 x) { return float8_to_float<E4m3>(x.code); }
inline float to_float(Float8E5m2 x) { return float8_to_float<E5m2>(x.code); }

// The nearest code, saturating.
inline void from_float(float x, Int8& out) { out.code = to_int8(x); }
inline void from_float(float x, Float8E4m3& out) { out.code = to_float8<E4m3>(x); }
inline void from_float(float x, Float8E5m2& out) { out.code = to_float8<E5m2>(x); }

// The largest number that has a code.
template <class Code>
constexpr float kLargestOf = Code::Format::kMax;
template <>
inline constexpr float kLargestOf<Int8> = kLargestInt8;

}  // namespace octavo::cpu
