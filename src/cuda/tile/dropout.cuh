// Dropout on the softmax weights of one warp's 16 rows, in the accumulator layout of ptx/mma.h (and of
// wgmma).
#pragma once

#include "common/dropout.h"

#include <cstdint>

namespace octavo::cuda {

// The two rows of which this lane holds elements: Dropout::head, and the query counted from the sequence's
// first.
struct DropoutRows {
    uint64_t head[2];
    int32_t query[2];
};

// Zeroes the weights of 8 * kTiles keys that dropout leaves out; first_key is a multiple of 8 * kTiles.
// `weight(i, j)` is element j of column group i.
template <int kTiles, class Weight>
__device__ __forceinline__ void drop_weights(const Dropout& dropout, const DropoutRows& rows,
                                             int32_t first_key, Weight weight) {
    static_assert(kTiles % 2 == 0, "what was drawn is used from its begin or from its middle");
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Philox random;
#pragma unroll
        for (int i = 0; i < kTiles; i += 2) {
            const int32_t place = kTiles % 4 == 0 ? i % 4 * 8 : (first_key + 8 * i) % 32;
            if (place == 0 || i == 0) {
                random = dropout.bits(rows.head[half], rows.query[half], (first_key + 8 * i) / 32,
                                      threadIdx.x % 4);
            }
#pragma unroll
            for (int next = 0; next < 2; ++next) {
                const uint32_t word = place == 0 ? random.words[next] : random.words[2 + next];
                if (dropout.drops_even(word)) weight(i + next, 2 * half) = 0.0f;
                if (dropout.drops_odd(word)) weight(i + next, 2 * half + 1) = 0.0f;
            }
        }
    }
}

}  // namespace octavo::cuda
