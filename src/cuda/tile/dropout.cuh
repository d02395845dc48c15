// Dropout on the softmax weights of one warp's 16 rows, in the accumulator layout of ptx/mma.h (and of
// wgmma).
#pragma once

#include "common/dropout.h"

#include <cstdint>

namespace octavo::cuda {

// A row of weights: the head as Dropout::head numbers it, and the query counted from the sequence's first.
struct DropoutRow {
    uint64_t head;
    int32_t query;
};

// Which weights dropout keeps in kRows rows of this lane, each of kTiles column groups (8 * kTiles keys).
template <int kRows, int kTiles>
class DropoutMask {
  public:
    // Draws the mask of the tile of keys that begins with first_key, a multiple of 8 * kTiles. `row(r)` is
    // the DropoutRow of this lane's r-th row. It works row after row, so that it needs few registers; but it
    // is best called before the scores of the tile take theirs.
    template <class Row>
    __device__ __forceinline__ void draw(const Dropout& dropout, int32_t first_key, Row row) {
#pragma unroll 1
        for (int r = 0; r < kRows; ++r) {
            const DropoutRow at = row(r);
            uint32_t bits = 0;
            Philox random;
#pragma unroll
            for (int i = 0; i < kTiles; i += 2) {
                // One draw serves four column groups; a tile may begin with the third of them.
                const int32_t place = kTiles % 4 == 0 ? i % 4 * 8 : (first_key + 8 * i) % 32;
                if (place == 0 || i == 0)
                    random = dropout.bits(at.head, at.query, (first_key + 8 * i) / 32, threadIdx.x % 4);
#pragma unroll
                for (int next = 0; next < 2; ++next) {
                    const uint32_t word = place == 0 ? random.words[next] : random.words[2 + next];
                    bits |= dropout.drops_even(word) ? 0 : 1u << 2 * (i + next);
                    bits |= dropout.drops_odd(word) ? 0 : 2u << 2 * (i + next);
                }
            }
            // The rows' words rotate, so that after the last turn of the loop each is in its place: an index
            // that the loop counts would not be a constant.
#pragma unroll
            for (int other = 1; other < kRows; ++other) bits_[other - 1] = bits_[other];
            bits_[kRows - 1] = bits;
        }
    }

    // Call it in place of draw() where nothing is dropped.
    __device__ __forceinline__ void keep_all() {
#pragma unroll
        for (uint32_t& bits : bits_) bits = ~0u;
    }

    // Applies the mask to a pair of 16-bit weights of row r in column group i, the even column in the low
    // bits.
    __device__ __forceinline__ uint32_t apply(uint32_t pair, int r, int i) const {
        auto mask = [&](int bit) { return static_cast<int32_t>(bits_[r] << (31 - bit)) >> 31; };
        return pair & ((mask(2 * i) & 0x0000ffff) | (mask(2 * i + 1) & 0xffff0000));
    }

  private:
    static_assert(kTiles % 2 == 0 && kTiles <= 16);
    uint32_t bits_[kRows];  // column group i has bit 2 i for the even column, 2 i + 1 for the odd one
};

}  // namespace octavo::cuda
