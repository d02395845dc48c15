// When the arrays' own library multiplies in place of Octavo: Python hands such calls over to it
// (python/octavo/_linear_on_cuda.py). C++ and C have no library to hand over to.
#pragma once

#include "cuda/gpu.h"
#include "params/linear_params.h"

#include <string>

namespace octavo::cuda {

// Why PyTorch, CuPy or JAX had better compute this product on this GPU; empty if Octavo does.
std::string why_library(const LinearParams& params, const Gpu& gpu);

}  // namespace octavo::cuda
