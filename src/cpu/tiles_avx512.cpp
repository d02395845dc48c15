// The kernels for x86-64-v4. What the headers define was compiled for every machine before the target
// changes: nothing outside this namespace may hold an instruction that only some have.
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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#endif

namespace octavo::cpu::avx512 {

constexpr int kLanes = 16;
constexpr int kBlockRows = 6;  // 24 of 32 registers hold the block of c
constexpr int kBlockVectors = 4;
constexpr int kPanelBlockRows = 6;  // 24 of 32 registers hold sums, 4 weights
constexpr int kMaxStreamedRows = 3 * kPanelBlockRows;

#include "cpu/simd.inl"

// The forms with a mask: gcc 12 warns of an uninitialised value in the others.
OCTAVO_SIMD BitsVec widen(HalfVec x) { return (BitsVec)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x); }
OCTAVO_SIMD Vec float_of_half(HalfVec x) { return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x); }
OCTAVO_SIMD HalfVec half_of_float(Vec x) {
    return (HalfVec)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#include "cpu/rows.inl"

#include "cpu/gemm.inl"

#include "cpu/panel.inl"

#include "cpu/key_tile.inl"

#include "cpu/forward_tile.inl"

#include "cpu/backward_tile.inl"

#include "cpu/linear_tile.inl"

#include "cpu/rms_norm.inl"

#include "cpu/latent.inl"

const Kernels kKernels = {kForwardKernels, kBackwardKernels, kLinearKernels, kRmsNormKernels, kLatentKernels};

}  // namespace octavo::cpu::avx512

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif  // __x86_64__
