// Which tile of which sequence a CTA works on.
#pragma once

#include "cuda/warp.cuh"
#include "params/index_array.h"

#include <cstdint>

namespace octavo::cuda {

// A tile of rows of one sequence; `batch` is -1 past the last tile.
struct SequenceTile {
    int32_t batch;
    int32_t index;  // the tile's number in the sequence
};

// Returns tile `index` of a batch. `tiles`: how many tiles each sequence has, if all have the same length.
// Every lane of a warp gets the answer.
template <int kRows>
__device__ __forceinline__ SequenceTile find_sequence_tile(const IndexArray& cu_seqlens, int32_t batch,
                                                           int32_t tiles, int32_t index) {
    if (!cu_seqlens) return {index / tiles, index % tiles};
    int32_t before = 0;  // tiles of the sequences before
    for (int32_t base = 0; base < batch; base += 32) {
        const int32_t b = base + static_cast<int32_t>(threadIdx.x % 32);
        int32_t own = 0;
        if (b < batch) own = (cu_seqlens[b + 1] - cu_seqlens[b] + kRows - 1) / kRows;
        const int32_t end = inclusive_sum(own);
        const uint32_t past = __ballot_sync(~0u, index < before + end);
        if (past) {
            const int32_t owner = __ffs(past) - 1;
            const int32_t begin = __shfl_sync(~0u, end - own, owner);
            return {base + owner, index - before - begin};
        }
        before += __shfl_sync(~0u, end, 31);
    }
    return {-1, 0};
}

}  // namespace octavo::cuda
