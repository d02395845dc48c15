// What the warps of key_gradients_kernel hand to each other: weights and gradients of scores of a tile,
// rounded to 16 bits, [keys][queries] in shared memory.
#pragma once

#include "cuda/ptx/ldmatrix.h"
#include "cuda/sm80_backward/tile.cuh"

namespace octavo::cuda {

// Pieces of 16 bytes of a row change places by an exclusive or with bits of the row's number, so that eight
// rows at the same column lie in different banks.
template <class T, int kRows, int kColumns>
struct ExchangeTile {
    static constexpr int kPieces = kColumns / 8, kRowBytes = sizeof(T) * kColumns;
    static_assert((kPieces & (kPieces - 1)) == 0 && kPieces > 1);
    alignas(16) T elements[kRows * kColumns];

    // A warp writes its rows and columns from first_row and first_column on, both multiples of 16.
    template <int kRowTiles, int kTiles>
    __device__ __forceinline__ void put(const float (&values)[kRowTiles][kTiles][4], int first_row,
                                        int first_column) {
        const int row = first_row + static_cast<int>(threadIdx.x) % 32 / 4;
        char* const to = reinterpret_cast<char*>(elements) + row * kRowBytes + threadIdx.x % 4 * 4;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            char* const piece = to + place(row, first_column / 8 + i);
#pragma unroll
            for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float* const pair = values[t][i] + 2 * half;
                    *reinterpret_cast<uint32_t*>(piece + (16 * t + 8 * half) * kRowBytes) =
                        pack<T>(pair[0], pair[1]);
                }
            }
        }
    }

    // Loads operand a: 16 kRowTiles rows, of 16 columns.
    template <int kRowTiles>
    __device__ __forceinline__ void load_rows(uint32_t (&a)[kRowTiles][4], int first_row,
                                              int first_column) const {
        const int lane = threadIdx.x % 32;
        const uint32_t from = address(first_row + lane % 16, first_column / 8 + lane / 16);
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) ptx::ldmatrix_x4(a[t], from + 16 * t * kRowBytes);
    }
    // This lane's address for ldmatrix_x4_trans of the first 16 rows, so that columns are rows of operand a.
    // The next 16 rows are 16 kRowBytes further.
    __device__ __forceinline__ uint32_t columns(int first_column) const {
        const int lane = threadIdx.x % 32;
        return address(lane / 16 * 8 + lane % 8, first_column / 8 + lane / 8 % 2);
    }

  private:
    __device__ __forceinline__ static int place(int row, int piece) {
        // Rows of 16, 8, 4 and 2 pieces, of which 8 lie in all banks: every 1, 1, 2 and 4 rows.
        constexpr int kShift = kPieces == 4 ? 1 : kPieces == 2 ? 2 : 0, kMask = kPieces < 8 ? kPieces - 1 : 7;
        return (piece ^ (row >> kShift & kMask)) * 16;
    }
    __device__ __forceinline__ uint32_t address(int row, int piece) const {
        return ptx::shared_address(elements) + row * kRowBytes + place(row, piece);
    }
};

}  // namespace octavo::cuda
