// Which kernel would work through a batch whose sequences share no prefix.
#pragma once

#include "cuda/decode/plan.h"
#include "cuda/divide_queries/plan.h"
#include "cuda/expand_codes/plan.h"
#include "cuda/gpu.h"
#include "cuda/sm80_attention/plan.h"
#include "cuda/sm90_attention/plan.h"
#include "cuda/sm90_wide_attention/plan.h"
#include "params/attention_params.h"

#include <variant>

namespace octavo::cuda {

using KernelPlan =
    std::variant<SplitKvPlan, StreamKPlan, ExpandedPlan, DividedPlan, Sm90Plan, Sm90WidePlan, Sm80Plan>;

// Returns the plan of the first kernel that serves, in the order above. There must be at least one query.
KernelPlan plan_kernel(const AttentionParams& params, const Gpu& gpu);

// Returns the plan for what is left of a batch behind the sequences of an earlier plan. Of packed queries,
// total_q is still that of the whole batch.
KernelPlan plan_rest(const AttentionParams& params, const Gpu& gpu);

// How many sequences the plan covers, from the first of the batch on. The others need another plan.
int32_t num_sequences(const KernelPlan& plan);

Explanation describe(const KernelPlan& plan);

}  // namespace octavo::cuda
