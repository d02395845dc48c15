// Tests whether rows can move in large pieces.
#pragma once

#include <octavo/tensor.h>

#include <cstdint>
#include <initializer_list>

namespace octavo::cuda {

// Whether every row starts at a multiple of `bytes` bytes: the pointer does, and so do the strides (in
// elements) that move it.
inline bool aligned(const void* pointer, int64_t bytes, std::initializer_list<int64_t> strides, DType dtype) {
    bool all = reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
    for (int64_t stride : strides) all = all && stride * size_of(dtype) % bytes == 0;
    return all;
}

}  // namespace octavo::cuda
