// What a launch of sm80_linear hands to its kernel.
#pragma once

#include "cuda/linear/output.h"

#include <cstdint>

namespace octavo::cuda {

struct Sm80LinearLaunch {
    const void *w, *x;
    int64_t w_stride, x_stride;
    int64_t depth;
    uint32_t x_tiles;
    int32_t out_columns;  // columns of the result in a tile
    bool static_weight;   // whether w may be read before the previous kernel has ended
    LinearOutput output;
};

}  // namespace octavo::cuda
