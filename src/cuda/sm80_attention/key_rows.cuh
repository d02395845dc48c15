// Where the rows of K and V lie, and their way to shared memory.
#pragma once

#include "common/fast_divide.h"
#include "cuda/sm80_attention/code_rows.cuh"
#include "cuda/tile/load.cuh"
#include "cuda/warp.cuh"
#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// K or V, at the sequence and head of a CTA.
template <class T>
struct KeyArray {
    const T* base;
    int64_t outer_stride, token_stride;
    bool aligned;  // every row starts on 16 bytes
};

// This lane's part of the copies of K and V. Keys that no row of the CTA sees are never read: their rows are
// zeros, since 0 x NaN would spoil the product.
template <class T, class Config>
class KeyRows {
  public:
    // `pages` is the sequence's row of the page table, or null. `found` is room in shared memory for the
    // pages of a tile, where each warp keeps those of the rows that it copies. `mapped` is any mapped
    // address.
    __device__ KeyRows(const KeyTiles& tiles, const IndexArray& pages, FastDivide page_size, int32_t* found,
                       const T* mapped)
        : tiles_(tiles),
          pages_(pages),
          page_size_(page_size),
          mapped_(mapped),
          row_(Copy::row()),
          column_(Copy::column()),
          found_(found + row_) {
        pin_in_register(row_);
        pin_in_register(column_);
    }

    // Looks up the pages of a tile; they arrive with this thread's current cp.async group.
    __device__ __forceinline__ void find(int32_t tile) const {
        if (!pages_) return;
        __syncwarp();  // what was found before has been read
        if (column_ != 0) return;
#pragma unroll
        for (int i = 0; i < Copy::kCount; ++i) {
            const int32_t key = tiles_.start(tile) + row_ + i * Copy::kRowsAtOnce;
            const bool needed = tiles_.needed(key);
            ptx::cp_async_4(found_ + i * Copy::kRowsAtOnce, pages_.at(needed ? page_size_.quotient(key) : 0),
                            needed);
        }
    }

    // Copies the tile that was found last. `target` is where the lane's part begins.
    __device__ __forceinline__ void copy(int32_t tile, uint32_t target, const KeyArray<T>& array,
                                         int32_t head_dim) const {
        const int32_t first_key = tiles_.start(tile), end = first_key + Config::kKeys;
        const T* source[Copy::kCount];
        if (pages_) {
#pragma unroll
            for (int i = 0; i < Copy::kCount; ++i) {
                const int32_t slot = page_size_.remainder(first_key + row_ + i * Copy::kRowsAtOnce);
                source[i] = array.base + found_[i * Copy::kRowsAtOnce] * array.outer_stride +
                            slot * array.token_stride + column_;
            }
        } else {
            // All terms but the first are the same for every lane.
            const T* row = array.base + first_key * array.token_stride;
            const int64_t lane = row_ * array.token_stride + column_;
#pragma unroll
            for (int i = 0; i < Copy::kCount; ++i, row += Copy::kRowsAtOnce * array.token_stride)
                source[i] = row + lane;
        }
        if ((end <= tiles_.prefix_end) | ((first_key >= tiles_.window_begin) & (end <= tiles_.window_end))) {
            Copy::template run<true>(target, source, 0, column_, head_dim, array.aligned);
            return;
        }
        uint32_t valid = 0;
#pragma unroll
        for (int i = 0; i < Copy::kCount; ++i) {
            const bool needed = tiles_.needed(first_key + row_ + i * Copy::kRowsAtOnce);
            valid |= needed << i;
            source[i] = needed ? source[i] : mapped_;
        }
        Copy::template run<false>(target, source, valid, column_, head_dim, array.aligned);
    }

    // The same for codes, which become numbers on the way. They have arrived when this function returns.
    __device__ __forceinline__ void copy(int32_t tile, uint32_t target, const CodeArray& array,
                                         int32_t head_dim) const {
#pragma unroll 1
        for (int i = 0; i < Copy::kCount; ++i) {
            const int32_t key = tiles_.start(tile) + row_ + i * Copy::kRowsAtOnce;
            const bool needed = tiles_.needed(key);
            CodeArray::Row row{};
            if (needed) row = array.row(found_[i * Copy::kRowsAtOnce], page_size_.remainder(key));
            for (int begin = 0; begin + column_ < head_dim; begin += Copy::kStep) {
                const uint4 numbers = needed ? array.load<T>(row, begin + column_) : make_uint4(0, 0, 0, 0);
                const uint32_t place =
                    target + sizeof(T) * (i * Copy::kRowsAtOnce * Config::kRowStride + begin);
                *static_cast<uint4*>(__cvta_shared_to_generic(place)) = numbers;
            }
        }
    }

    // Where this lane's part of a tile begins.
    __device__ uint32_t place(const T* tile) const {
        return ptx::shared_address(tile + row_ * Config::kRowStride + column_);
    }

  private:
    using Copy = TileCopy<T, Config, Config::kKeys>;

    const KeyTiles& tiles_;
    const IndexArray pages_;
    const FastDivide page_size_;
    const T* const mapped_;
    int32_t row_, column_;
    int32_t* const found_;
};

}  // namespace octavo::cuda
