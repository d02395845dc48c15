// Which tiles of keys or of queries a block mask keeps for a CTA. Every warp that asks gets the same answer.
#pragma once

#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// The query blocks [first_row, first_row + num_rows) of the heads [first_head, first_head + num_heads).
struct KeptBlocks {
    const BlockMask& mask;
    const uint8_t* first;  // the mask's row for the first query block of the first head
    int32_t num_heads, num_rows;

    // The blocks of the queries from first_query to last_query of a sequence.
    __device__ KeptBlocks(const AttentionParams& p, int32_t batch, int32_t first_head, int32_t num_heads,
                          int32_t first_query, int32_t last_query)
        : mask(p.block_mask),
          first(p.block_mask.row(batch, first_head, first_query)),
          num_heads(p.block_mask.head_stride == 0 ? 1 : num_heads),
          num_rows(last_query / p.block_mask.size - first_query / p.block_mask.size + 1) {}

    // Whether some of them look at the key blocks of the keys from first_key to last_key.
    __device__ bool any(int32_t first_key, int32_t last_key) const {
        return __any_sync(~0u, count<true>(first_key, last_key));
    }
    // Whether all of them look at all of these.
    __device__ bool all(int32_t first_key, int32_t last_key) const {
        return !__any_sync(~0u, count<false>(first_key, last_key));
    }

  private:
    // Whether one of this lane's blocks is kept (kKept), or one is hidden.
    template <bool kKept>
    __device__ bool count(int32_t first_key, int32_t last_key) const {
        const int32_t column = first_key / mask.size, num_columns = last_key / mask.size - column + 1;
        bool found = false;
        for (int32_t i = threadIdx.x % 32; i < num_heads * num_rows * num_columns; i += 32) {
            const int32_t row = i / num_columns;
            const uint8_t* const blocks =
                first + row / num_rows * mask.head_stride + row % num_rows * mask.row_stride + column;
            found |= (blocks[i % num_columns] != 0) == kKept;
        }
        return found;
    }
};

}  // namespace octavo::cuda
