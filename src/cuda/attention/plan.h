// What a call of attention or paged_attention runs on a GPU.
#pragma once

#include "cuda/attention/kernel_plan.h"
#include "cuda/shared_prefix/plan.h"

#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace octavo::cuda {

struct NothingToDo {};  // no query
inline bool operator==(NothingToDo, NothingToDo) { return true; }

using AttentionPlan = std::variant<NothingToDo, SharedPrefixPlan, KernelPlan>;

AttentionPlan plan_attention(const AttentionParams& params, const Gpu& gpu);

// The kernels that attention has, without those of sm_90a in a build that has none.
std::vector<std::string> attention_instances(bool with_sm90);

}  // namespace octavo::cuda
