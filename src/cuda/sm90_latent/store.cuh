// How a thread of sm90_latent writes rows of results.
#pragma once

#include "cuda/types.h"

#include <cstdint>

namespace octavo::cuda {

// Word k of the lane that is c-th of four becomes word c of the k-th.
__device__ __forceinline__ void transpose_over_four_lanes(uint32_t (&words)[4]) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
        const bool is_upper = (threadIdx.x & distance) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & distance) continue;
            uint32_t &low = words[i], &high = words[i + distance];
            const uint32_t got = __shfl_xor_sync(~0u, is_upper ? low : high, distance);
            (is_upper ? low : high) = got;
        }
    }
}

// Writes kPieces pieces of eight columns of two rows, of which each of four lanes has two columns, as wgmma
// leaves them: the first four pieces of `sums` have columns 0 to 31. A lane writes whole pieces. `to`: where
// both rows begin, null if there is no such row. All lanes of a warp call this together.
template <class T, int kPieces>
__device__ __forceinline__ void store_pieces(T* const (&to)[2], const float* sums, const float (&scale)[2]) {
    static_assert(kPieces % 4 == 0);
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int first = 0; first < kPieces; first += 4) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* const pair = sums + 4 * (first + j) + 2 * i;
                words[j] = pack<T>(pair[0] * scale[i], pair[1] * scale[i]);
            }
            transpose_over_four_lanes(words);
            if (to[i])
                *reinterpret_cast<uint4*>(to[i] + 8 * (first + lane)) =
                    make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

}  // namespace octavo::cuda
