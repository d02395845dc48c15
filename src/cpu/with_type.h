// From a dtype to the type that holds its numbers on the CPU.
#pragma once

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
        case DType::int32: break;  // holds indices, which no operator computes with
    }
    throw TypeError("octavo: the CPU does not compute in " + to_string(dtype));
}

}  // namespace octavo::cpu
