// Which rows a CTA works on.
#pragma once

#include "common/fast_divide.h"
#include "cuda/warp.cuh"
#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// A tile of rows of one sequence; `batch` is -1 past the last tile.
struct RowTile {
    int32_t batch;
    int32_t first_row;
};

// Finds the sequence that the row tile `index` of the batch belongs to, and its first row there. The last
// tile of a sequence, which sees most keys under a causal mask, comes first. Every lane of a warp gets the
// answer.
template <int kRows>
__device__ __forceinline__ RowTile find_row_tile(const AttentionParams& p, FastDivide sequence_tiles,
                                                 int32_t index) {
    if (!p.cu_seqlens_q) {
        const int32_t batch = sequence_tiles.quotient(index), tiles = sequence_tiles.divisor;
        return {batch, (tiles - 1 - (index - batch * tiles)) * kRows};
    }
    const int32_t group_size = p.group_size();
    const int32_t lane = threadIdx.x % 32;
    int32_t before = 0;  // tiles of the sequences before
    for (int32_t base = 0; base < p.batch; base += 32) {
        const int32_t b = base + lane;
        int32_t tiles = 0;
        if (b < p.batch) tiles = (p.served_queries(b) * group_size + kRows - 1) / kRows;
        const int32_t end = inclusive_sum(tiles);
        const uint32_t past = __ballot_sync(~0u, index < before + end);
        if (past) {
            const int32_t owner = __ffs(past) - 1;
            const int32_t last = __shfl_sync(~0u, end, owner) - 1;
            return {base + owner, (before + last - index) * kRows};
        }
        before += __shfl_sync(~0u, end, 31);
    }
    return {-1, 0};
}

}  // namespace octavo::cuda
