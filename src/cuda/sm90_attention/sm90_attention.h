// Attention forward on Hopper's tensor cores, for many query tokens a sequence.
#pragma once

#include "params/attention_params.h"

#include <cuda_runtime.h>

#include <string>
#include <vector>

namespace octavo::cuda {

// Whether sm90_attention() serves this problem on its device; sm80_attention() serves every one.
bool sm90_attention_serves(const AttentionParams& params);
void sm90_attention(const AttentionParams& params, cudaStream_t stream);

std::vector<std::string> sm90_attention_instances();

}  // namespace octavo::cuda
