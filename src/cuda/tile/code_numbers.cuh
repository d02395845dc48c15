// Converts codes of 8 and 4 bits to the float16 numbers that they stand for, in their order.
//
// The bits of a code make its number exactly: put below the bits of a power of two, an integer is added to
// that power. With a scale, which is rounded to float16 itself, the product is rounded to float16. Where the
// scales of usual keys and values would leave float16's range of normal numbers, they are multiplied by a
// power of two; results then have to be multiplied by unlift().
#pragma once

#include "common/float_bits.h"
#include "cuda/tile/code_pairs.cuh"
#include "cuda/types.h"

#include <cstring>

namespace octavo::cuda {

__device__ __forceinline__ __half2 pair_of_bits(uint32_t bits) {
    __half2 pair;
    memcpy(&pair, &bits, sizeof(bits));
    return pair;
}
__device__ __forceinline__ uint32_t bits_of_pair(__half2 pair) {
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}

// The factor that the numbers of scaled codes have yet to be multiplied by.
__device__ __forceinline__ float unlift(DType codes) { return codes == DType::float8_e4m3fn ? 0.125f : 1.0f; }

// Converts the codes of one token and head. `word`: that token and head's word of CacheScales. Without
// kScaled, numbers are the values of the codes themselves.
template <DType kType, bool kScaled>
class CodeNumbers;

template <bool kScaled>
class CodeNumbers<DType::float8_e4m3fn, kScaled> {
  public:
    static constexpr int kPairs = 2;  // pairs of numbers in a word of codes

    __device__ explicit CodeNumbers(uint32_t word) : scale_(__float2half2_rn(8.0f * float_of_bits(word))) {}

    __device__ void convert(uint32_t codes, uint32_t* pairs) const {
        // In one piece of assembly ptxas sees that the upper half needs no shift.
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
            "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
            : "=r"(pairs[0]), "=r"(pairs[1])
            : "r"(codes));
        if constexpr (kScaled) {
            pairs[0] = bits_of_pair(__hmul2(pair_of_bits(pairs[0]), scale_));
            pairs[1] = bits_of_pair(__hmul2(pair_of_bits(pairs[1]), scale_));
        }
    }

  private:
    const __half2 scale_;
};

template <bool kScaled>
class CodeNumbers<DType::float8_e5m2, kScaled> {
  public:
    static constexpr int kPairs = 2;

    __device__ explicit CodeNumbers(uint32_t word)
        : scale_(__float2half2_rn(4096.0f * float_of_bits(word))) {}

    __device__ void convert(uint32_t codes, uint32_t* pairs) const {
        pairs[0] = convert_pair(select_bytes<0x1404>(codes));
        pairs[1] = convert_pair(select_bytes<0x3424>(codes));
    }

  private:
    __device__ uint32_t convert_pair(uint32_t exact) const {
        constexpr uint32_t kLowered = 0x0c000c00u;  // 2^-12
        if constexpr (!kScaled) return exact;
        return bits_of_pair(__hmul2(__hmul2(pair_of_bits(exact), pair_of_bits(kLowered)), scale_));
    }

    const __half2 scale_;
};

template <bool kScaled>
class CodeNumbers<DType::int8, kScaled> {
  public:
    static constexpr int kPairs = 2;

    __device__ explicit CodeNumbers(uint32_t word) : scale_(__float2half2_rn(64.0f * float_of_bits(word))) {}

    __device__ void convert(uint32_t codes, uint32_t* pairs) const {
        constexpr uint32_t kUpperBytes = 0x64646464u;  // 1024's upper byte: above a byte n it makes 1024 + n
        codes ^= 0x80808080u;                          // makes n + 128 of each byte
        pairs[0] = convert_pair(select_bytes<0x4140>(codes, kUpperBytes));
        pairs[1] = convert_pair(select_bytes<0x4342>(codes, kUpperBytes));
    }

  private:
    // The bytes read as 1024 + (n + 128), from which the offset is subtracted.
    __device__ uint32_t convert_pair(uint32_t bytes) const {
        constexpr uint32_t kOffset = 0xe480e480u;                               // -1152
        constexpr uint32_t kFactor = 0x24002400u, kScaledOffset = 0xcc80cc80u;  // 2^-6 and -18: n / 64
        if constexpr (!kScaled) return bits_of_pair(__hadd2(pair_of_bits(bytes), pair_of_bits(kOffset)));
        return bits_of_pair(__hmul2(
            __hfma2(pair_of_bits(bytes), pair_of_bits(kFactor), pair_of_bits(kScaledOffset)), scale_));
    }

    const __half2 scale_;
};

template <>
class CodeNumbers<DType::int4, true> {
  public:
    static constexpr int kPairs = 4;

    __device__ explicit CodeNumbers(uint32_t word)
        : scale_(pair_of_bits(select_bytes<0x1010>(word))),
          minimum_(pair_of_bits(select_bytes<0x3232>(word))) {}

    __device__ void convert(uint32_t codes, uint32_t* pairs) const {
        const uint32_t odd = codes >> 4;
        pairs[0] = convert_pair(select_bytes<0x4440>(codes, odd));
        pairs[1] = convert_pair(select_bytes<0x5551>(codes, odd));
        pairs[2] = convert_pair(select_bytes<0x6662>(codes, odd));
        pairs[3] = convert_pair(select_bytes<0x7773>(codes, odd));
    }

  private:
    // Converts the lower halves of bytes 0 and 2.
    __device__ uint32_t convert_pair(uint32_t bytes) const {
        constexpr uint32_t kMagic = 0x64006400u;  // 1024
        uint32_t magic;
        asm("lop3.b32 %0, %1, %2, %3, 0xea;"  // a & b | c
            : "=r"(magic)
            : "r"(bytes), "n"(0x000f000f), "n"(kMagic));
        return bits_of_pair(__hfma2(__hsub2(pair_of_bits(magic), pair_of_bits(kMagic)), scale_, minimum_));
    }

    const __half2 scale_, minimum_;
};

}  // namespace octavo::cuda
