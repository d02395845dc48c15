// Launches the plans of attention_backward.
#pragma once

#include "cuda/attention_backward/sink_terms.h"
#include "cuda/sm80_backward/plan.h"
#include "cuda/sm90_backward/plan.h"
#include "params/attention_backward_params.h"

#include <cuda_runtime.h>

namespace octavo::cuda {

// The current device has to be that of the parameters.
void run(const AttentionBackwardParams& params, const Sm80BackwardPlan& plan, cudaStream_t stream);
void run(const AttentionBackwardParams& params, const Sm90BackwardPlan& plan, cudaStream_t stream);

// Launches the kernel that sums up the gradients of sinks, right behind the kernel that writes their terms.
void launch_sink_gradients(const AttentionBackwardParams& params, const SinkTerms& sinks,
                           cudaStream_t stream);

// Launches the kernel that adds up dK and dV of the parts, behind the kernels that compute them. `params`:
// the call itself, whose rows of dK and dV have to start on 16 bytes.
void launch_add_group_parts(const AttentionBackwardParams& params, const AttentionBackwardParams& divided,
                            cudaStream_t stream);

}  // namespace octavo::cuda
