// The blocks of 16 keys that a warp works on, and their way from the pages to the products.
#pragma once

#include "cuda/decode/schedule.cuh"
#include "cuda/ptx/l2_policy.h"

namespace octavo::cuda {

// Where the keys of one block are: lane l knows key l % 16.
struct BlockKeys {
    int32_t page, slot;
    bool needed;  // false: not there, or seen by no query
    int32_t kv_head;

    // Block `index` of an item.
    __device__ static BlockKeys find(const ForwardParams& p, const FastDivide& page_size, const Item& item,
                                     const KeyTiles& tiles, int32_t index) {
        const int32_t key = tiles.start(index) + static_cast<int32_t>(threadIdx.x % kBlockKeys);
        const int32_t page_index = page_size.quotient(key);
        BlockKeys keys{0, key - page_index * p.page_size, index < tiles.count && tiles.needed(key),
                       item.kv_head};
        if (keys.needed) keys.page = p.page_table[item.sequence * p.page_table_stride + page_index];
        return keys;
    }
};

// One block in shared memory: 16 rows of K, then 16 of V. A row's 16-byte chunks are permuted so that neither
// copying rows nor reading fragments meets a bank conflict.
template <class Config>
class Block {
  public:
    // `queue` is the warp's.
    __device__ Block(uint4* queue, int32_t stage) : chunks_(queue + stage * Config::kBlockChunks) {}

    // Key 8 i + lane / 4, dims 32 j + 8 (lane % 4) and on.
    __device__ uint4 k(int i, int j) const {
        const int lane = threadIdx.x % 32;
        return chunks_[k_index(8 * i + lane / 4, 4 * j + lane % 4)];
    }
    // Key 8 (i / 2) + 2 (lane % 4) + i % 2, dims 64 c + 8 (lane / 4) and on.
    __device__ uint4 v(int i, int c) const {
        const int lane = threadIdx.x % 32;
        return chunks_[v_index(8 * (i / 2) + 2 * (lane % 4) + i % 2, 8 * c + lane / 4)];
    }

    // Starts the copies, whole rows at a time: requests of 64 bytes instead reach 2.3 of 2.9 TB/s on an H100.
    // What is not needed, and columns from head_dim on, become zeros.
    template <class T>
    __device__ void copy(const ForwardParams& p, const BlockKeys& keys, uint64_t policy) {
        constexpr int kColumns = Config::kHeadDim / 8;
        const int lane = threadIdx.x % 32;
        const T* const k = static_cast<const T*>(p.k) + keys.kv_head * p.k_head_stride;
        const T* const v = static_cast<const T*>(p.v) + keys.kv_head * p.v_head_stride;
#pragma unroll 2
        for (int i = lane; i < kBlockKeys * kColumns; i += 32) {
            const int row = i / kColumns, column = i % kColumns;
            const int64_t page = __shfl_sync(~0u, keys.page, row), slot = __shfl_sync(~0u, keys.slot, row);
            const bool needed = __shfl_sync(~0u, keys.needed, row);
            const bool valid = needed && 8 * column < p.head_dim;
            const T* k_row = k + page * p.k_outer_stride + slot * p.k_token_stride + 8 * column;
            const T* v_row = v + page * p.v_outer_stride + slot * p.v_token_stride + 8 * column;
            ptx::cp_async_16(chunks_ + k_index(row, column), valid ? k_row : p.q, valid, policy);
            ptx::cp_async_16(chunks_ + v_index(row, column), valid ? v_row : p.q, valid, policy);
        }
    }

  private:
    // Reading K, eight lanes of a phase take four chunks of two rows; reading V, two chunks of four rows.
    __device__ static int k_index(int row, int chunk) {
        return row * Config::kRowChunks + (chunk ^ ((row & 1) << 2));
    }
    __device__ static int v_index(int row, int chunk) {
        return (kBlockKeys + row) * Config::kRowChunks + (chunk ^ (row & 6));
    }

    uint4* chunks_;
};

}  // namespace octavo::cuda
