// Copies tiles of rows from global to shared memory.
#pragma once

#include "cuda/ptx/cp_async.h"
#include "cuda/types.h"

#include <cstdint>

namespace octavo::cuda {

// How the lanes of a CTA divide the rows of a tile: each warp takes a run of rows, and kLanesPerRow lanes
// copy one row together, 16 bytes each at a time.
template <class T, class Config, int kTileRows>
struct TileCopy {
    static constexpr int kRowsAtOnce = 32 / Config::kLanesPerRow;
    static constexpr int kWarpRows = kTileRows / Config::kWarps;
    static constexpr int kCount = kWarpRows / kRowsAtOnce;  // rows that a lane helps to copy
    static_assert(kCount * kRowsAtOnce == kWarpRows);
    static constexpr int kChunk = 16 / sizeof(T), kStep = kChunk * Config::kLanesPerRow;

    // The first row and column of this lane. Its next rows are kRowsAtOnce further, its next columns kStep
    // further.
    __device__ static int row() {
        return threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / Config::kLanesPerRow;
    }
    __device__ static int column() { return threadIdx.x % Config::kLanesPerRow * kChunk; }

    // Copies this lane's parts of its rows: by this thread's current cp.async group where rows are `aligned`,
    // and otherwise at once. `target` is the address of the lane's first row and column in shared memory. Row
    // i comes from source[i], which points to the lane's first column. With kAll false, a row whose bit in
    // `valid` is not set becomes zeros, and its source is any mapped address. Columns from head_dim on are
    // left alone.
    template <bool kAll>
    __device__ static void run(uint32_t target, const T* const (&source)[kCount], uint32_t valid, int column,
                               int32_t head_dim, bool aligned) {
        if (aligned) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
#pragma unroll
                for (int begin = 0; begin < Config::kHeadDim; begin += kStep) {
                    ptx::cp_async_16_if(column < head_dim - begin,
                                        target + sizeof(T) * (i * kRowsAtOnce * Config::kRowStride + begin),
                                        source[i] + begin, kAll || (valid >> i & 1));
                }
            }
            return;
        }
        auto* const elements = static_cast<T*>(__cvta_shared_to_generic(target));
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
#pragma unroll 1
            for (int begin = 0; begin + column < head_dim; begin += kStep) {
#pragma unroll
                for (int j = begin; j < begin + kChunk; ++j) {
                    elements[i * kRowsAtOnce * Config::kRowStride + j] =
                        kAll || (valid >> i & 1) ? source[i][j] : from_float<T>(0.0f);
                }
            }
        }
    }
};

// Zeroes the columns from head_dim on, which no copy fills.
template <class Config, int kTileRows, class T>
__device__ __forceinline__ void zero_columns(T* tile, int32_t head_dim) {
    const int columns = Config::kHeadDim - head_dim;
    for (int i = threadIdx.x; i < kTileRows * columns; i += Config::kThreads)
        tile[i / columns * Config::kRowStride + head_dim + i % columns] = from_float<T>(0.0f);
}

}  // namespace octavo::cuda
