// The kernels for any machine: four lanes, which the compiler maps to SSE2, NEON or plain floats.
#include "common/macros.h"
#include "common/online_softmax.h"
#include "cpu/kernels.h"
#include "cpu/with_type.h"

#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#pragma GCC diagnostic ignored "-Wpsabi"

namespace octavo::cpu::baseline {

constexpr int kLanes = 4;
constexpr int kBlockRows = 6;  // 12 of 16 registers hold the block of c
constexpr int kBlockVectors = 2;
constexpr int kPanelBlockRows = 2;  // 8 of 16 registers hold sums, 4 weights; there is no multiply-add
constexpr int kMaxStreamedRows =
    kPanelBlockRows;  // 16 bits are widened in many steps, which pays off once a key
constexpr int kMaxDirectRows = kPanelBlockRows;

#include "cpu/simd.inl"

OCTAVO_SIMD BitsVec widen(HalfVec x) { return __builtin_convertvector(x, BitsVec); }
OCTAVO_SIMD Vec float_of_half(HalfVec x) {
    Vec result;
    for (int i = 0; i < kLanes; ++i) result[i] = to_float(Float16{x[i]});
    return result;
}
OCTAVO_SIMD HalfVec half_of_float(Vec x) {
    HalfVec result;
    for (int i = 0; i < kLanes; ++i) {
        Float16 half;
        from_float(x[i], half);
        result[i] = half.bits;
    }
    return result;
}

constexpr bool kHasPairProducts = false;

#include "cpu/tiles.inl"

}  // namespace octavo::cpu::baseline
