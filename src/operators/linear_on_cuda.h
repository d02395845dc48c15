// linear() on a GPU, for which there is no kernel yet.
#pragma once

#include "cuda/gpu.h"
#include "params/linear_params.h"

#include <octavo/explain.h>

namespace octavo::cuda {

// Throws DeviceError: C++ and C have no other library to call.
void linear(const LinearParams& params, void* stream);

// What Python does in place of it: the arrays' own library multiplies (python/octavo/_linear_on_cuda.py).
Explanation explain(const LinearParams& params, const Gpu& gpu);

}  // namespace octavo::cuda
