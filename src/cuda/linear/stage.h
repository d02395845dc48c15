// The stages that the kernels of linear have in shared memory.
#pragma once

#include "common/macros.h"

#include <cstdint>

namespace octavo::cuda {

constexpr int32_t kPanelColumns = 64;  // 128 bytes of a row of an operand, with 128-byte swizzle
constexpr int32_t kFlatWarps = 8;      // warps that share the columns of a stage (flat_tile.cuh)

// A stage of the ring in shared memory: of each panel the rows of x, then those of w.
struct LinearStage {
    int32_t w_rows, x_rows, panels;

    OCTAVO_HD constexpr int32_t x_bytes() const { return x_rows * panels * 128; }
    OCTAVO_HD constexpr int32_t w_bytes() const { return w_rows * panels * 128; }
    OCTAVO_HD constexpr int32_t bytes() const { return x_bytes() + w_bytes(); }
};

}  // namespace octavo::cuda
