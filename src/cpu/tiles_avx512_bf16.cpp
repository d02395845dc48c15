// The kernels for x86-64-v4 with products of pairs of bfloat16 (AVX512_BF16); see tiles_avx512.cpp.
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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,prefer-vector-width=512")
#endif

namespace octavo::cpu::avx512_bf16 {

#include "cpu/avx512.inl"

constexpr bool kHasPairProducts = true;
// Adds the product of the upper halves of each lane, then that of the lower ones. The bits are those of two
// multiply-adds, but that subnormal numbers count as zero.
OCTAVO_SIMD Vec add_pair_products(Vec sum, BitsVec a, BitsVec b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

#include "cpu/tiles.inl"

}  // namespace octavo::cpu::avx512_bf16

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif  // __x86_64__
