// What the kernels with vectors of 512 bits have of their own. Included inside their namespace.

constexpr int kLanes = 16;
constexpr int kBlockRows = 6;  // 24 of 32 registers hold the block of c
constexpr int kBlockVectors = 4;
constexpr int kPanelBlockRows = 6;  // 24 of 32 registers hold sums, 4 weights
constexpr int kMaxStreamedRows = 3 * kPanelBlockRows;
constexpr int kMaxDirectRows = kLinearTileRows;

#include "cpu/simd.inl"

// The forms with a mask: gcc 12 warns of an uninitialised value in the others.
OCTAVO_SIMD BitsVec widen(HalfVec x) { return (BitsVec)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x); }
OCTAVO_SIMD Vec float_of_half(HalfVec x) { return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x); }
OCTAVO_SIMD HalfVec half_of_float(Vec x) {
    return (HalfVec)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
