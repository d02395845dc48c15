// Launches append_kv where the cache holds codes.
#pragma once

#include "cuda/cache/plan.h"
#include "params/cache_params.h"

#include <cuda_runtime.h>

namespace octavo::cuda {

// The current device has to be that of the parameters.
void append_codes(const AppendKvParams& params, const AppendKvPlan& plan, cudaStream_t stream);

}  // namespace octavo::cuda
