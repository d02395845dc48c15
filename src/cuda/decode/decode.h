// Paged attention for few query tokens a sequence, in one launch.
#pragma once

#include "ops/forward_params.h"

#include <cuda_runtime.h>

#include <string>
#include <vector>

namespace octavo::cuda {

// Whether decode() serves this problem on its device; the forward kernel serves every one.
bool decode_serves(const ForwardParams& params);
void decode(const ForwardParams& params, cudaStream_t stream);

std::vector<std::string> decode_instances();

}  // namespace octavo::cuda
