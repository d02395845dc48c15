// Attention on every GPU from sm_80 up.
#pragma once

#include "params/attention_params.h"

#include <cuda_runtime.h>

#include <cstddef>

namespace octavo::cuda {

// Serves every problem; others are faster where they serve. `shared_bytes`, what a block may have of shared
// memory, picks the tiles.
void sm80_attention(const AttentionParams& params, size_t shared_bytes, cudaStream_t stream);

}  // namespace octavo::cuda
