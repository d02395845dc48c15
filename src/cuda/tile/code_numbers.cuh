// From codes of 8 and 4 bits to the numbers of 16 bits that they stand for, in their order.
//
// Codes become numbers exactly, by their bits: an integer below the bits of a power of two is added to it,
// and a byte of its own is a subnormal bfloat16. With a scale, the product is rounded to 16 bits: for
// integers the scale enters as a sum of two numbers of 16 bits, for float8 the product is taken in float32.
// Of int4 under bfloat16, the sum of the first terms is rounded, and that with the second ones again.
#pragma once

#include "common/float16.h"
#include "cuda/tile/code_pairs.cuh"
#include "cuda/types.h"

#include <type_traits>

namespace octavo::cuda {

// Two numbers of 16 bits at a time, and constants in both.
template <class T>
struct Pair;
template <>
struct Pair<float16> {
    using Type = __half2;
    // Below the bits of 1024, a byte is 1024 + n.
    static constexpr uint32_t kMagic = 0x64006400u;
    // What makes n / 64 of 1024 + (n + 128).
    static constexpr uint32_t kUpperBytes = 0x64646464u, kInt8Factor = 0x24002400u,  // 2^-6
        kInt8Offset = 0xcc80cc80u;                                                   // -18
    static constexpr uint32_t k64 = 0x54005400u;
};
template <>
struct Pair<bfloat16> {
    using Type = __nv_bfloat162;
    // Below the bits of 128, seven bits are 128 + n.
    static constexpr uint32_t kMagic = 0x43004300u;
    // A byte is a subnormal number, n 2^-133: what makes n / 64 of n + 128.
    static constexpr uint32_t kUpperBytes = 0u, kInt8Factor = 0x7f007f00u,  // 2^127
        kInt8Offset = 0xc000c000u;                                          // -2
    static constexpr uint32_t k64 = 0x42804280u;
};
template <class T>
__device__ __forceinline__ typename Pair<T>::Type pair_of_bits(uint32_t bits) {
    typename Pair<T>::Type pair;
    memcpy(&pair, &bits, sizeof(bits));
    return pair;
}
template <class T>
__device__ __forceinline__ uint32_t bits_of_pair(typename Pair<T>::Type pair) {
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}
template <class T>
__device__ __forceinline__ typename Pair<T>::Type twice(float x) {
    return pair_of_bits<T>(pack<T>(x, x));
}

// A number as the sum of two of 16 bits, each twice.
template <class T>
struct Terms {
    typename Pair<T>::Type high, low;

    __device__ explicit Terms(float x) : high(twice<T>(x)), low(twice<T>(x - to_float(from_float<T>(x)))) {}
};

// What turns the codes of one token and head into numbers. `word`: of CacheScales; with kScaled false, the
// codes themselves are the numbers.
template <class T, DType kType, bool kScaled>
class CodeNumbers {  // of float8
  public:
    static constexpr int kPairs = 2;  // that a word of codes makes

    __device__ explicit CodeNumbers(uint32_t word) : scale_(float_of_bits(word)) {}

    __device__ void convert(uint32_t codes, uint32_t* pairs) const {
        uint32_t exact[2];
        if constexpr (kType == DType::float8_e4m3fn) {
            // As one piece of assembly, in which ptxas sees that the upper half needs no shift.
            asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
                "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
                : "=r"(exact[0]), "=r"(exact[1])
                : "r"(codes));
        } else {
            exact[0] = select_bytes<0x1404>(codes);
            exact[1] = select_bytes<0x3424>(codes);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (!kScaled && std::is_same_v<T, float16>) {
                pairs[i] = exact[i];
            } else {
                float2 numbers = unpack<float16>(exact[i]);
                if constexpr (kScaled) numbers = {numbers.x * scale_, numbers.y * scale_};
                pairs[i] = pack<T>(numbers.x, numbers.y);
            }
        }
    }

  private:
    const float scale_;
};

template <class T, bool kScaled>
class CodeNumbers<T, DType::int8, kScaled> {
  public:
    static constexpr int kPairs = 2;

    __device__ explicit CodeNumbers(uint32_t word) : scale_(scale_of(float_of_bits(word))) {}

    __device__ void convert(uint32_t codes, uint32_t* pairs) const {
        codes ^= 0x80808080u;  // n + 128
        pairs[0] = convert_pair(select_bytes<0x4140>(codes, Pair<T>::kUpperBytes));
        pairs[1] = convert_pair(select_bytes<0x4342>(codes, Pair<T>::kUpperBytes));
    }

  private:
    // Of n / 64. float16 has no larger one, nor numbers for most codes of it; NaN stays.
    __device__ static float scale_of(float scale) {
        constexpr float kLargest = 65504.0f;
        return std::is_same_v<T, float16> && 64.0f * scale > kLargest ? kLargest : 64.0f * scale;
    }
    __device__ uint32_t convert_pair(uint32_t bytes) const {
        const auto n = __hfma2(pair_of_bits<T>(bytes), pair_of_bits<T>(Pair<T>::kInt8Factor),
                               pair_of_bits<T>(Pair<T>::kInt8Offset));
        if constexpr (!kScaled) return bits_of_pair<T>(__hmul2(n, pair_of_bits<T>(Pair<T>::k64)));
        return bits_of_pair<T>(__hfma2(n, scale_.high, __hmul2(n, scale_.low)));
    }

    const Terms<T> scale_;
};

template <class T>
class CodeNumbers<T, DType::int4, true> {
  public:
    static constexpr int kPairs = 4;

    __device__ explicit CodeNumbers(uint32_t word)
        : scale_(unpack<float16>(word).x), minimum_(unpack<float16>(word).y) {}

    __device__ void convert(uint32_t codes, uint32_t* pairs) const {
        const uint32_t odd = codes >> 4;
        pairs[0] = convert_pair(select_bytes<0x4440>(codes, odd));
        pairs[1] = convert_pair(select_bytes<0x5551>(codes, odd));
        pairs[2] = convert_pair(select_bytes<0x6662>(codes, odd));
        pairs[3] = convert_pair(select_bytes<0x7773>(codes, odd));
    }

  private:
    // Of the lower half of bytes 0 and 2.
    __device__ uint32_t convert_pair(uint32_t bytes) const {
        uint32_t magic;
        asm("lop3.b32 %0, %1, %2, %3, 0xea;"  // a & b | c
            : "=r"(magic)
            : "r"(bytes), "n"(0x000f000f), "n"(Pair<T>::kMagic));
        const auto n = __hsub2(pair_of_bits<T>(magic), pair_of_bits<T>(Pair<T>::kMagic));
        // float16, as which it is kept, needs no second term.
        if constexpr (std::is_same_v<T, float16>)
            return bits_of_pair<T>(__hfma2(n, scale_.high, minimum_.high));
        const auto low = __hfma2(n, scale_.low, minimum_.low);
        return bits_of_pair<T>(__hadd2(__hfma2(n, scale_.high, minimum_.high), low));
    }

    const Terms<T> scale_, minimum_;
};

}  // namespace octavo::cuda
