// What a launch of sm90_linear hands to its kernel.
#pragma once

#include "cuda/linear/output.h"

#include <cuda.h>

#include <cstdint>

namespace octavo::cuda {

// w and x are tensors of five axes: the columns of a panel, rows, the two halves of w where there is a gate,
// panels, and one more. Where K is no multiple of a panel, the innermost axis is all of K, so that columns
// behind it are loaded as zeros, and a copy moves one panel alone.
struct Sm90LinearLaunch {
    CUtensorMap w, x;
    bool copies_stages;              // whether one copy moves a whole stage of w, or of x
    bool static_weight;              // whether w may be read before the previous kernel has ended
    int32_t steps;                   // stages that K takes
    int32_t splits;                  // splits of K: the CTAs of a cluster
    int32_t x_tiles, num_tiles;      // tiles of x; tiles in all, those of x innermost
    int32_t w_tiles, column_groups;  // tiles of w; groups of eight columns of the result, which they share
    int32_t stages, stage_bytes, panels;  // stages of the ring; bytes and panels of a stage
    LinearOutput output;
    // Of an instance that normalises x: the weights, as one row of x; where their panels lie behind the
    // stages, right behind the sums of squares and the factors; what is added to the mean of squares; K.
    CUtensorMap norm_weight;
    int32_t norm_offset;
    float norm_eps;
    int32_t depth;

    // The first column of the result that belongs to a tile of w; it is defined for the tile behind the last,
    // too. All tiles have the same number of columns, give or take eight, so that none is nearly empty.
    OCTAVO_HD int32_t first_column(int32_t w_tile) const {
        return static_cast<int32_t>(static_cast<uint32_t>(w_tile) * static_cast<uint32_t>(column_groups) /
                                    static_cast<uint32_t>(w_tiles)) *
               8;
    }
};

}  // namespace octavo::cuda
