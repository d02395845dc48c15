// The 8-bit numbers that a cache may hold, as types of their own, and to and from float32.
#pragma once

#include "common/float8.h"

#include <cmath>
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

inline float to_float(Int8 x) { return x.code; }
inline float to_float(Float8E4m3 x) { return float8_to_float<E4m3>(x.code); }
inline float to_float(Float8E5m2 x) { return float8_to_float<E5m2>(x.code); }

// The nearest of -127 to 127, ties to even; NaN is 0.
inline void from_float(float x, Int8& out) {
    const float bounded = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x == x ? x : 0.0f;
    out.code = static_cast<int8_t>(std::nearbyintf(bounded));
}
inline void from_float(float x, Float8E4m3& out) { out.code = to_float8<E4m3>(x); }
inline void from_float(float x, Float8E5m2& out) { out.code = to_float8<E5m2>(x); }

}  // namespace octavo::cpu
