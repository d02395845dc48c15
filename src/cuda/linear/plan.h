// What a call of linear runs on a GPU.
#pragma once

#include "cuda/gpu.h"
#include "cuda/sm80_linear/plan.h"
#include "cuda/sm90_linear/plan.h"
#include "params/linear_norm.h"

#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace octavo::cuda {

using LinearKernelPlan = std::variant<Sm90LinearPlan, Sm80LinearPlan>;

// Returns the plan for params.plan, which must serve the call, or otherwise that of the first kernel that
// serves, in the order above. One of them serves every call for which why_no_cuda_kernel() has no reason.
LinearKernelPlan plan_linear(const LinearParams& params, const Gpu& gpu);

// Whether the launch of this plan normalises x itself, of a call that asks for it. Otherwise rms_norm comes
// before, and the plan is that of the normalised rows.
bool normalises(const LinearKernelPlan& plan);

// The stride of rows that rms_norm writes, which all start on 16 bytes.
int64_t normalised_stride(const LinearParams& params);

// The most rows of x for which Octavo's kernel is taken as faster than the library where no table says it.
int64_t most_rows_without_table(const Gpu& gpu);

// The plan that Python executes, which may be the library.
LinearPlan public_plan(const LinearParams& params, const Gpu& gpu);

// The kernels that compute contiguous arrays of this shape, and their estimated times in microseconds, the
// fastest first. 0: the time is not known.
std::vector<std::pair<LinearPlan, double>> linear_candidates(const LinearProblem& problem, DType dtype,
                                                             const Gpu& gpu);

// The kernels that linear has, without those of sm_90a in a build that has none.
std::vector<std::string> linear_instances(bool with_sm90);

}  // namespace octavo::cuda
