// Tiles of rows from global to shared memory.
#pragma once

#include "cuda/ptx/cp_async.h"
#include "cuda/types.h"

#include <cstdint>

namespace octavo::cuda {

// Copies rows to shared memory. `row_pointer(r)` gives row r, or null for a row of zeros; columns from
// head_dim on are zeros. Ends in this thread's current cp.async group, or at once where rows are unaligned.
template <class Config, int kRows, class T, class RowPointer>
__device__ __forceinline__ void load_rows(T* tile, int32_t head_dim, bool aligned, const T* any_address,
                                          RowPointer row_pointer) {
    constexpr int kChunk = 16 / sizeof(T);
    constexpr int kChunks = Config::kHeadDim / kChunk;
#pragma unroll 4
    for (int i = threadIdx.x; i < kRows * kChunks; i += Config::kThreads) {
        const int row = i / kChunks, column = i % kChunks * kChunk;
        const T* source = row_pointer(row);
        const bool valid = source != nullptr && column < head_dim;
        T* target = tile + row * Config::kRowStride + column;
        if (aligned) {
            ptx::cp_async_16(target, valid ? source + column : any_address, valid);
        } else {
#pragma unroll
            for (int j = 0; j < kChunk; ++j) target[j] = valid ? source[column + j] : from_float<T>(0.0f);
        }
    }
}

}  // namespace octavo::cuda
