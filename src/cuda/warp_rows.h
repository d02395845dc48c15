// The grids of kernels in which each warp works on one row.
#pragma once

#include "cuda/plan.h"

#include <cstdint>

namespace octavo::cuda {

constexpr int kRowsPerBlock = 4;  // one warp each

inline unsigned blocks_for_rows(int64_t rows) {
    return static_cast<unsigned>((rows + kRowsPerBlock - 1) / kRowsPerBlock);
}

// Makes the explanation of such a kernel, except for the name of its file.
Explanation describe_warp_rows(const char* kernel, DType dtype, int64_t num_rows, const char* noun);

}  // namespace octavo::cuda
