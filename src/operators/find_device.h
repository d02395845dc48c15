// Finds devices by their names, for functions that take no arrays.
#pragma once

#include "cuda/gpu.h"

#include <string>

namespace octavo {

// Returns the GPU that `device` names: one of cuda::gpu_names(), or a GPU of this machine ("cuda:0"). Null
// for "cpu".
const cuda::Gpu* find_device(const char* op, const std::string& device);

}  // namespace octavo
