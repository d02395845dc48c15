// What a call of attention_backward runs on a GPU.
#pragma once

#include "cuda/gpu.h"
#include "cuda/sm80_backward/plan.h"
#include "cuda/sm90_backward/plan.h"
#include "params/attention_backward_params.h"

#include <string>
#include <variant>
#include <vector>

namespace octavo::cuda {

using BackwardPlan = std::variant<Sm90BackwardPlan, Sm80BackwardPlan>;

// Returns the plan of the first kernel that serves, in the order above.
BackwardPlan plan_attention_backward(const AttentionBackwardParams& params, const Gpu& gpu);

// The kernels that attention_backward has, without those of sm_90a in a build that has none.
std::vector<std::string> backward_instances(bool with_sm90);

}  // namespace octavo::cuda
