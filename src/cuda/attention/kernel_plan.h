// Which kernel would work through a batch whose sequences share no prefix.
#pragma once

#include "cuda/decode/plan.h"
#include "cuda/expand_codes/plan.h"
#include "cuda/gpu.h"
#include "cuda/sm80_attention/plan.h"
#include "cuda/sm90_attention/plan.h"
#include "params/attention_params.h"

#include <variant>

namespace octavo::cuda {

using KernelPlan = std::variant<SplitKvPlan, StreamKPlan, ExpandedPlan, Sm90Plan, Sm80Plan>;

// The plan of the first kernel that serves, in the order above. There is at least one query.
KernelPlan plan_kernel(const AttentionParams& params, const Gpu& gpu);

// The sequences that the plan covers, from the first of the batch on. Another plan is made for the others.
int32_t num_sequences(const KernelPlan& plan);

Explanation describe(const KernelPlan& plan);

}  // namespace octavo::cuda
