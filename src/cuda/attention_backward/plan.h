// Which kernels compute the gradients of attention: none yet.
#pragma once

#include "params/attention_backward_params.h"

#include <string>

namespace octavo::cuda {

// Why there is no kernel for this call; empty if there is one.
std::string why_no_backward(const AttentionBackwardParams& params);

}  // namespace octavo::cuda
