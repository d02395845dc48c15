// Devices by their names, for what needs no arrays.
#pragma once

#include "cuda/gpu.h"

#include <string>

namespace octavo {

// The GPU that `device` names: one of cuda::gpu_names(), or "cuda:0", a GPU of this machine. Null: "cpu".
const cuda::Gpu* find_device(const char* op, const std::string& device);

}  // namespace octavo
