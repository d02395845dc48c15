// The execution of the plans of linear.
#pragma once

#include "cuda/sm80_linear/plan.h"
#include "cuda/sm90_linear/plan.h"
#include "params/linear_params.h"

#include <cuda_runtime.h>

namespace octavo::cuda {

// Each launches a plan; the current device has to be that of the parameters.
void run(const LinearParams& params, const Sm80LinearPlan& plan, cudaStream_t stream);
void run(const LinearParams& params, const Sm90LinearPlan& plan, cudaStream_t stream);

}  // namespace octavo::cuda
