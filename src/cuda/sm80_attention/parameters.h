// What a launch of sm80_attention hands to the kernel.
#pragma once

#include "common/fast_divide.h"

#include <cstdint>

namespace octavo::cuda {

// How one launch cuts the work.
struct Sm80Launch {
    int32_t num_row_tiles;  // over the batch; a bound when the queries are packed
    int32_t num_splits;
    FastDivide group_size, page_size;
    FastDivide sequence_tiles;  // row tiles of one sequence, unless the queries are packed
    // Partial results, if there is more than one split: out [num_splits, total_q * num_q_heads, head_dim_v]
    // and LSE [num_splits, total_q * num_q_heads].
    float* partial_out;
    float* partial_lse;
    // Whether every row starts at a multiple of 16 bytes, so that it can move in pieces of 16 bytes.
    bool q_aligned, k_aligned, v_aligned, out_aligned;
};

}  // namespace octavo::cuda
