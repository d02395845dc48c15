// Rows of keys, values and queries in shared memory.
#pragma once

#include "cuda/decode/tiles.h"

#include <cstdint>

namespace octavo::cuda {

// Rows of kChunks chunks of 16 bytes each. The rows start at a multiple of 128 bytes (of 512 for fewer than
// eight chunks). The chunks of a row are swizzled, so that neither the copies of a row nor reads of one chunk
// of eight rows meet a bank conflict: chunk c of row r lies in the place of chunk c ^ exchange(r).
template <int kChunks>
struct Rows {
    static_assert(kChunks == 2 || kChunks == 4 || kChunks % 8 == 0);
    uint32_t address;  // in the shared window

    __device__ static int exchange(int row) {
        return kChunks == 2 ? row / 4 % 2 : (kChunks == 4 ? row / 2 % 4 : row % 8);
    }
    // The offset from the start of the rows at which a lane reads a chunk, below eight, of a row.
    __device__ static uint32_t offset(int row, int chunk) {
        return 16 * (row * kChunks + (chunk ^ exchange(row)));
    }
    // The address `chunks` further; `chunks` must be a multiple of the power of two above the lanes' chunks.
    __device__ static uint32_t advance(uint32_t address, int chunks) {
        return (address ^ (16 * (chunks % 8))) + 16 * (chunks / 8 * 8);
    }
    // From the place of a chunk of row r, returns the place of the same chunk `rows` further; `rows` must be
    // a multiple of the power of two above r.
    __device__ static uint32_t advance_rows(uint32_t place, int rows) {
        return (place ^ (16 * exchange(rows))) + 16 * rows * kChunks;
    }
};

template <class Config>
using QueryRows = Rows<Config::kRowChunks>;
template <class Config>
using KeyRows = Rows<Config::kKeyChunks>;
template <class Config>
using ValueRows = Rows<Config::kValueChunks>;

// The addresses of row `row`'s slope, behind the rows of an item's queries, and of its softmax_phi, behind
// all slopes.
template <class Config>
__device__ __forceinline__ uint32_t slope_address(QueryRows<Config> queries, int row) {
    return queries.address + 16 * Config::kRows * Config::kRowChunks + static_cast<int>(sizeof(float)) * row;
}
template <class Config>
__device__ __forceinline__ uint32_t phi_address(QueryRows<Config> queries, int row) {
    static_assert(2 * sizeof(float) * Config::kRows <= 16 * Config::kHeadNumberChunks);
    return slope_address<Config>(queries, Config::kRows + row);
}
// The address of the lower half of the tree mask's word for a row's query, which has the bits of all queries
// of an item. It lies in the place of softmax_phi.
template <class Config>
__device__ __forceinline__ uint32_t tree_word_address(QueryRows<Config> queries, int row) {
    static_assert(Config::kRows <= 32);
    return phi_address<Config>(queries, row);
}

}  // namespace octavo::cuda
