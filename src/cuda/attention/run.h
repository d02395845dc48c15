// Launches plans, on a stream of the current device, which must be that of the parameters. A launch covers
// the sequences of its plan, the first num_sequences of the batch.
#pragma once

#include "cuda/decode/plan.h"
#include "cuda/divide_queries/plan.h"
#include "cuda/expand_codes/plan.h"
#include "cuda/shared_prefix/plan.h"
#include "cuda/sm80_attention/plan.h"
#include "cuda/sm90_attention/plan.h"
#include "cuda/sm90_wide_attention/plan.h"
#include "params/attention_params.h"

#include <cuda_runtime.h>

namespace octavo::cuda {

// beside: which kernel is the one before on the stream. It may still be running, but this kernel will not
// complete before it.
void run(const AttentionParams& params, const SplitKvPlan& plan, cudaStream_t stream,
         Beside beside = Beside::nothing);
void run(const AttentionParams& params, const StreamKPlan& plan, cudaStream_t stream);
void run(const AttentionParams& params, const ExpandedPlan& plan, cudaStream_t stream);
void run(const AttentionParams& params, const DividedPlan& plan, cudaStream_t stream);
void run(const AttentionParams& params, const Sm90Plan& plan, cudaStream_t stream);
void run(const AttentionParams& params, const Sm90WidePlan& plan, cudaStream_t stream);
void run(const AttentionParams& params, const Sm80Plan& plan, cudaStream_t stream);

void run(const AttentionParams& params, const SharedPrefixPlan& plan, cudaStream_t stream);

// Combines the results over the runs of a shared prefix with those behind it into those of `params`.
void combine_prefix(const AttentionParams& params, const AttentionParams& behind_prefix,
                    const AttentionParams& over_prefix, cudaStream_t stream);

}  // namespace octavo::cuda
