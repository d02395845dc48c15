// How the kernels that share Sm90Scheduler cut a batch into row tiles, and what all of them need.
#pragma once

#include "cuda/gpu.h"
#include "params/attention_params.h"

#include <cstdint>
#include <string>

namespace octavo::cuda {

// Of a dense batch, the order of its row tiles: see Sm90Launch.
struct Sm90Order {
    int32_t unit_row_tiles;  // row tiles of one unit: a sequence and a run of heads that lie side by side
    int32_t num_units;
    int32_t section, first_section;  // units
};

// Whether the GPU and the call allow any of these kernels; why_not, unless null, gets the reason where not.
bool suits_sm90(const AttentionParams& params, const Gpu& gpu, std::string* why_not);

// Whether the copy engine can move the arrays of the call; without `with_keys`, k and v are left out.
bool can_move_arrays(const AttentionParams& params, bool with_keys, std::string* why_not);

// How many heads lie side by side in the 64 rows of a warpgroup: a divisor of the group size.
int32_t choose_heads(const AttentionParams& params);

// The number of row tiles, each of `row_blocks` blocks of 64 rows, over the batch and all heads; for a packed
// batch it is a bound.
int64_t count_row_tiles(const AttentionParams& params, int32_t row_blocks, int32_t heads);

// `ctas` CTAs of a cluster have `row_blocks` blocks of 64 rows.
Sm90Order order_row_tiles(const AttentionParams& params, const Gpu& gpu, int32_t row_blocks, int32_t ctas,
                          int32_t heads);

}  // namespace octavo::cuda
