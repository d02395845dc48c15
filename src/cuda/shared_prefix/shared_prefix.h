// Attention over sequences that begin with the same pages, which are read once.
#pragma once

#include "params/attention_params.h"

#include <cuda_runtime.h>

namespace octavo::cuda {

// For a shared_prefix_len above 0: a launch over the prefix, one behind it, and one that merges, where each
// of the first two is one launch by itself.
void shared_prefix_attention(const AttentionParams& params, cudaStream_t stream);

}  // namespace octavo::cuda
