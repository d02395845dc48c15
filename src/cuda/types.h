// The names of element types on the device, and their conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <octavo/tensor.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace octavo::cuda {

using float16 = __half;
using bfloat16 = __nv_bfloat16;
using float32 = float;
// The type of queries and results in an instance that serves both types of 16 bits.
struct AnyFloat16 {
    uint16_t bits;
};

// The type in which products of queries of type T are computed.
template <class T>
struct ProductType {
    using Type = T;
};
template <>
struct ProductType<AnyFloat16> {
    using Type = float16;
};

template <class T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float16>() {
    return DType::float16;
}
template <>
constexpr DType dtype_of<bfloat16>() {
    return DType::bfloat16;
}
template <>
constexpr DType dtype_of<float32>() {
    return DType::float32;
}

__device__ __forceinline__ float to_float(float16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float32 x) { return x; }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float16 from_float<float16>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ float32 from_float<float32>(float x) {
    return x;
}

// Packs two neighbours into one register, `low` for the lower address.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    static_assert(sizeof(T) == 2);
    const T parts[2] = {from_float<T>(low), from_float<T>(high)};
    uint32_t packed;
    memcpy(&packed, parts, sizeof(packed));
    return packed;
}

// The same for results, whose type is only known at run time where T is AnyFloat16.
template <class T>
__device__ __forceinline__ uint32_t pack_output(DType dtype, float low, float high) {
    if constexpr (std::is_same_v<T, AnyFloat16>) {
        return dtype == DType::bfloat16 ? pack<bfloat16>(low, high) : pack<float16>(low, high);
    } else {
        return pack<T>(low, high);
    }
}

template <class T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
    static_assert(sizeof(T) == 2);
    T parts[2];
    memcpy(parts, &pair, sizeof(pair));
    return {to_float(parts[0]), to_float(parts[1])};
}

// Calls `body` with a value of the element type that `dtype` names.
template <class Body>
void with_type(DType dtype, Body body) {
    switch (dtype) {
        case DType::float16: return body(float16{});
        case DType::bfloat16: return body(bfloat16{});
        default: return body(float32{});
    }
}

}  // namespace octavo::cuda
