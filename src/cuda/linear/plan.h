// What a call of linear runs on a GPU.
#pragma once

#include "cuda/gpu.h"
#include "cuda/sm80_linear/plan.h"
#include "cuda/sm90_linear/plan.h"
#include "params/linear_params.h"

#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace octavo::cuda {

using LinearKernelPlan = std::variant<Sm90LinearPlan, Sm80LinearPlan>;

// That of params.plan, which must serve the call, or else of the first kernel that serves, in the order
// above. One of them serves whatever why_no_cuda_kernel() lets through.
LinearKernelPlan plan_linear(const LinearParams& params, const Gpu& gpu);

// The most rows of x for which a kernel of Octavo is the faster one where no table says which it is.
int64_t most_rows_without_table(const Gpu& gpu);

// What Python runs, the library included.
LinearPlan public_plan(const LinearParams& params, const Gpu& gpu);

// The kernels that compute contiguous arrays of this shape, and what each ought to take, in microseconds, the
// fastest first. 0: not known.
std::vector<std::pair<LinearPlan, double>> linear_candidates(const LinearProblem& problem, DType dtype,
                                                             const Gpu& gpu);

// The kernels that linear has, without those of sm_90a in a build that has none.
std::vector<std::string> linear_instances(bool with_sm90);

}  // namespace octavo::cuda
