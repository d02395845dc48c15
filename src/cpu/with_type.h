// From a dtype to the type that holds its numbers on the CPU.
#pragma once

#include "cpu/codes.h"
#include "cpu/half.h"

#include <octavo/error.h>
#include <octavo/tensor.h>

namespace octavo::cpu {

// Calls `body` with a value of the element type that `dtype` names.
template <class Body>
void with_type(DType dtype, Body body) {
    switch (dtype) {
        case DType::float32: return body(float{});
        case DType::float16: return body(Float16{});
        case DType::bfloat16: return body(BFloat16{});
        case DType::int32:  // holds indices, which no operator computes with
        case DType::int8:
        case DType::float8_e4m3fn:
        case DType::float8_e5m2:
        case DType::uint8:
        case DType::int4:
        case DType::int64: break;
    }
    throw TypeError("octavo: the CPU does not compute in " + to_string(dtype));
}

// The same for what a cache may hold.
template <class Body>
void with_cache_type(DType dtype, Body body) {
    switch (dtype) {
        case DType::int8: return body(Int8{});
        case DType::float8_e4m3fn: return body(Float8E4m3{});
        case DType::float8_e5m2: return body(Float8E5m2{});
        case DType::int4: return body(Int4Pair{});
        case DType::float32:
        case DType::float16:
        case DType::bfloat16:
        case DType::int32:
        case DType::uint8:
        case DType::int64: break;
    }
    with_type(dtype, body);
}

// The same for keys and for values, of which the checks let only one pair differ.
template <class Body>
void with_cache_types(DType k_dtype, DType v_dtype, Body body) {
    if (k_dtype == DType::int8 && v_dtype == DType::int4) return body(Int8{}, Int4Pair{});
    with_cache_type(k_dtype, [&](auto type) { body(type, type); });
}

}  // namespace octavo::cpu
