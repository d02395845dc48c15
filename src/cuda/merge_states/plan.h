// How merge_states would work: with one warp per row.
#pragma once

#include "cuda/plan.h"
#include "params/merge_states_params.h"

namespace octavo::cuda {

struct MergeStatesPlan {
    DType dtype;
    int64_t num_rows;
};

MergeStatesPlan plan_merge_states(const MergeStatesParams& params);

Explanation describe(const MergeStatesPlan& plan);

}  // namespace octavo::cuda
