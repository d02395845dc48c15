// Paged attention for few query tokens a sequence, in one launch.
#pragma once

#include "params/attention_params.h"

#include <cuda_runtime.h>

#include <string>
#include <vector>

namespace octavo::cuda {

// Whether decode() serves this problem on its device; sm80_attention() serves every one.
bool decode_serves(const AttentionParams& params);
void decode(const AttentionParams& params, cudaStream_t stream);

std::vector<std::string> decode_instances();

}  // namespace octavo::cuda
