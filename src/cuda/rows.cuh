// Moving one row of head_dim elements with one warp.
#pragma once

#include "cuda/types.h"
#include "cuda/warp_rows.h"

#include <cstdint>

namespace octavo::cuda {

// The index of this warp's row.
__device__ __forceinline__ int64_t warp_row() {
    return int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / 32;
}

// Copies a row bit for bit. It moves 16 bytes at a time if `aligned`: both rows then start and end at
// multiples of 16 bytes.
template <class T>
__device__ __forceinline__ void copy_row(T* to, const T* from, int32_t head_dim, bool aligned) {
    const int lane = threadIdx.x % 32;
    if (aligned) {
        const int chunks = head_dim * static_cast<int>(sizeof(T)) / 16;
        for (int i = lane; i < chunks; i += 32)
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    } else {
        for (int i = lane; i < head_dim; i += 32) to[i] = from[i];
    }
}

}  // namespace octavo::cuda
