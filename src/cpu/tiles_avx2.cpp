// The kernels for x86-64-v3; see tiles_avx512.cpp.
#include "common/macros.h"
#include "common/online_softmax.h"
#include "cpu/kernels.h"
#include "cpu/with_type.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#pragma GCC diagnostic ignored "-Wpsabi"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

namespace octavo::cpu::avx2 {

constexpr int kLanes = 8;
constexpr int kBlockRows = 6;  // 12 of 16 registers hold the block of c
constexpr int kBlockVectors = 2;
constexpr int kPanelBlockRows = 3;  // 12 of 16 registers hold sums, 4 weights
constexpr int kMaxStreamedRows = 3 * kPanelBlockRows;
constexpr int kMaxDirectRows = kMaxStreamedRows;

#include "cpu/simd.inl"

OCTAVO_SIMD BitsVec widen(HalfVec x) { return (BitsVec)_mm256_cvtepu16_epi32((__m128i)x); }
OCTAVO_SIMD Vec float_of_half(HalfVec x) { return (Vec)_mm256_cvtph_ps((__m128i)x); }
OCTAVO_SIMD HalfVec half_of_float(Vec x) {
    return (HalfVec)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

constexpr bool kHasPairProducts = false;

#include "cpu/tiles.inl"

}  // namespace octavo::cpu::avx2

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif  // __x86_64__
