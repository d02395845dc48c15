// What a launch of sm90_attention or sm90_wide_attention hands to the kernel.
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
    CUtensorMap q, k, v, out;  // k and v are unused over codes
    int32_t q_edge, k_edge;

    // For each warpgroup, a row tile holds `heads` heads of one group (a divisor of the group size) at
    // `tokens` tokens: heads * tokens <= 64 rows. Rows run over the heads of a token first.
    int32_t heads, tokens;
    // How many keys one copy brings: a tile of them, half a tile for a pair of CTAs that share keys, or a
    // common divisor of the tile and the page size.
    int32_t box_keys;
    FastDivide page_size;

    // For dense arrays: the order of row tiles. A unit is one batch entry and one run of `heads` heads. A
    // section is `section` units; the first section, of `first_section` units, has what remains. Inside a
    // section, later row tiles come first, since under a causal mask they take longest.
    int32_t num_row_tiles;  // row tiles of one unit
    int32_t num_units;
    int32_t section, first_section;
    int32_t* counter;  // row tiles handed out beyond the first of each cluster; 0 between launches

    // The keys of each row tile behind the first `num_whole` are cut into num_splits splits; 0: of none. With
    // `by_length` those of long sequences are cut instead where the lengths of the batch are unlike. At most
    // `split_blocks` blocks of 64 rows, one per warpgroup, hold rows of a row tile.
    int32_t num_whole, num_splits, split_blocks;
    bool by_length;
    float* partial;      // [split of the launch, block]: partial results, see Sm90Split
    uint32_t* arrivals;  // [first split of a row tile, block]: how many have arrived; 0 between launches

    Codes codes;
};

}  // namespace octavo::cuda
