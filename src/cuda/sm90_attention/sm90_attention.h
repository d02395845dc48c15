// Attention forward on Hopper's tensor cores, for many query tokens a sequence.
#pragma once

#include "ops/forward_params.h"

#include <cuda_runtime.h>

#include <string>
#include <vector>

namespace octavo::cuda {

// Whether prefill() serves this problem on its device; the forward kernel serves every one.
bool prefill_serves(const ForwardParams& params);
void prefill(const ForwardParams& params, cudaStream_t stream);

std::vector<std::string> prefill_instances();

}  // namespace octavo::cuda
