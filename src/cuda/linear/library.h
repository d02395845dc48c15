// When the arrays' own library multiplies in place of Octavo: Python hands such calls to it
// (python/octavo/_linear_on_cuda.py). C++ and C have no library that they could hand calls to.
#pragma once

#include "cuda/gpu.h"
#include "params/linear_params.h"

#include <string>

namespace octavo::cuda {

// The reason why PyTorch, CuPy or JAX should compute this product on this GPU; empty if Octavo computes it.
std::string why_library(const LinearParams& params, const Gpu& gpu);

}  // namespace octavo::cuda
