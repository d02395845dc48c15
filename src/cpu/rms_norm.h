// Some rows of rms_norm: what the kernel of rms_norm.inl computes.
#pragma once

#include "params/rms_norm_params.h"

#include <cstdint>

namespace octavo::cpu {

struct RmsNormKernels {
    void (*normalise)(const RmsNormParams&, int64_t first_row, int64_t end_row);
};

}  // namespace octavo::cpu
