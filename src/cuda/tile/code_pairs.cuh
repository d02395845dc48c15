// Converts codes of 8 and 4 bits, as ldmatrix loads them, to the pairs of float16 that mma.sync takes.
//
// This neither subtracts nor moves anything between lanes. A byte or half a byte that is masked out of its
// word is a subnormal float16, n 2^-24 (or n 2^-20, where it stands four bits higher), which tensor cores
// take exactly, at full rate. Signed bytes have their highest bit flipped, which makes them n + 128. A factor
// and an offset correct the products, once per row.
#pragma once

#include <octavo/tensor.h>

#include <cuda_fp8.h>

#include <cstdint>

namespace octavo::cuda {

// Returns the four bytes that the hexadecimal digits of the selector name: digits 0 to 3 name the bytes of x,
// 4 to 7 those of y.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t select_bytes(uint32_t x, uint32_t y = 0) {
    return __byte_perm(x, y, kSelector);
}

// Returns (x & kMask) ^ kFlip by one instruction, where the compiler would take two.
template <uint32_t kMask, uint32_t kFlip>
__device__ __forceinline__ uint32_t mask_and_flip(uint32_t x) {
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "n"(kMask), "n"(kFlip));
    return y;
}

template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ uint32_t float8_pair(uint32_t two_codes) {
    const __half2_raw pair =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two_codes & 0xffffu), kFormat);
    return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
}

// How the codes of a type enter products.
template <DType kType>
struct CodePairs;

template <>
struct CodePairs<DType::float8_e4m3fn> {
    // The code's value is kUnit times the float16 that enters the product, minus kOffset.
    static constexpr float kUnit = 1.0f, kOffset = 0.0f;
    // Whether split() makes pairs (0, 2) and (1, 3) of four codes; otherwise (0, 1) and (2, 3).
    static constexpr bool kAlternates = false;

    __device__ static void split(uint32_t x, uint32_t& first, uint32_t& second) {
        first = float8_pair<__NV_E4M3>(x);
        second = float8_pair<__NV_E4M3>(x >> 16);
    }
    // Always makes pairs (0, 2) and (1, 3).
    __device__ static void split_alternating(uint32_t x, uint32_t& first, uint32_t& second) {
        split(select_bytes<0x3120>(x), first, second);
    }
};

template <>
struct CodePairs<DType::float8_e5m2> {  // a code is the upper byte of a float16
    static constexpr float kUnit = 1.0f, kOffset = 0.0f;
    static constexpr bool kAlternates = true;

    __device__ static void split(uint32_t x, uint32_t& first, uint32_t& second) {
        first = select_bytes<0x2404>(x);
        second = x & 0xff00ff00u;
    }
    __device__ static void split_alternating(uint32_t x, uint32_t& first, uint32_t& second) {
        split(x, first, second);
    }
};

template <>
struct CodePairs<DType::int8> {
    static constexpr float kUnit = 0x1p24f, kOffset = 128.0f;
    static constexpr bool kAlternates = true;

    __device__ static void split(uint32_t x, uint32_t& first, uint32_t& second) {
        first = mask_and_flip<0x00ff00ffu, 0x00800080u>(x);
        second = mask_and_flip<0x00ff00ffu, 0x00800080u>(x >> 8);
    }
    __device__ static void split_alternating(uint32_t x, uint32_t& first, uint32_t& second) {
        split(x, first, second);
    }
};

// A word holds eight numbers: pairs (0, 4) and (2, 6) enter in units of 2^-24, (1, 5) and (3, 7) in units of
// 2^-20.
template <>
struct CodePairs<DType::int4> {
    static constexpr float kUnit = 0x1p24f, kUpperUnit = 0x1p20f;

    __device__ static void split(uint32_t x, uint32_t (&pairs)[4]) {
        const uint32_t upper = x >> 8;
        pairs[0] = x & 0x000f000fu;
        pairs[1] = x & 0x00f000f0u;
        pairs[2] = upper & 0x000f000fu;
        pairs[3] = upper & 0x00f000f0u;
    }
};

}  // namespace octavo::cuda
