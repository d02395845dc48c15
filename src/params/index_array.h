// Page numbers, lengths and offsets, in the type in which the caller has them: int32 or int64.
#pragma once

#include "common/macros.h"

#include <octavo/tensor.h>

#include <cstdint>

namespace octavo {

// An array without gaps. Numbers of int64 are read as int32 too: their lower half, which comes first in
// memory. The stride is a parameter in either case, so that one instance of a kernel reads both.
struct IndexArray {
    const int32_t* data = nullptr;
    int32_t stride_bytes = sizeof(int32_t);

    static IndexArray of(const TensorView& t) {
        return {static_cast<const int32_t*>(t.data), static_cast<int32_t>(size_of(t.dtype))};
    }

    OCTAVO_HD explicit operator bool() const { return data != nullptr; }
    OCTAVO_HD const int32_t* at(int64_t i) const {
        return reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(data) + i * stride_bytes);
    }
    OCTAVO_HD int32_t operator[](int64_t i) const { return *at(i); }
    OCTAVO_HD IndexArray from(int64_t i) const { return {at(i), stride_bytes}; }

    // The whole number, for checks; operator[] returns the same only for numbers below 2^31.
    int64_t whole(int64_t i) const {
        return stride_bytes == sizeof(int64_t) ? *reinterpret_cast<const int64_t*>(at(i)) : *at(i);
    }
};

}  // namespace octavo
