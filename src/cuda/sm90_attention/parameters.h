// What a launch of sm90_attention hands to the kernel.
#pragma once

#include "common/fast_divide.h"
#include "cuda/codes.h"

#include <cuda.h>

#include <cstdint>

namespace octavo::cuda {

// How one launch finds its data and cuts its work.
//
// Every array is a tensor of five axes: column, head, place, shift, outer (batch or page). Place and shift
// both move by one token, and only their sum says which token is meant; so the edge of the place axis, where
// the copy engine loads zeros and stores nothing, can lie at the end of any sequence: there, place is `edge`
// and shift is the end. The base address lies `edge` tokens before the array's.
struct Sm90Launch {
    CUtensorMap q, k, v, out;  // k and v: unused over codes
    int32_t q_edge, k_edge;

    // A row tile holds for each warpgroup `heads` heads of one group (a divisor of the group size) at
    // `tokens` tokens: heads * tokens <= 64 rows, the heads of a token first.
    int32_t heads, tokens;
    // Keys that one copy brings: a tile of them, half of it for a pair of CTAs, or a divisor of the tile and
    // the page size.
    int32_t box_keys;
    FastDivide page_size;
    bool few_rows;  // whether some row tiles may be of few rows

    // Dense arrays: the order of row tiles. A unit is one batch entry and one run of heads; a section, so
    // many units, the first section what remains. Inside a section, later row tiles come first, as causal
    // ones take longest.
    int32_t num_row_tiles;  // row tiles of one unit
    int32_t num_units;
    int32_t section, first_section;
    int32_t* counter;  // row tiles handed out beyond the first of each cluster; 0 between launches

    // The keys of row tiles behind the first `num_whole` are shared out to num_splits parts each; 0: none is.
    // `split_blocks` of 64 rows at most, one a warpgroup, hold rows of a row tile.
    int32_t num_whole, num_splits, split_blocks;
    float* partial;      // [split of the launch, block]: Sm90Split
    uint32_t* arrivals;  // [row tile, block], of its parts; 0 between launches

    Codes codes;
};

}  // namespace octavo::cuda
