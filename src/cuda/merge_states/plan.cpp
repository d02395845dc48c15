#include "cuda/merge_states/plan.h"

#include "cuda/backend.h"
#include "cuda/warp_rows.h"

namespace octavo::cuda {

MergeStatesPlan plan_merge_states(const MergeStatesParams& p) {
    return {p.dtype, p.shape[0] * p.shape[1] * p.shape[2]};
}

Explanation describe(const MergeStatesPlan& plan) {
    Explanation text = describe_warp_rows("merge_states_kernel", plan.dtype, plan.num_rows, "row");
    text.file = "src/cuda/merge_states/merge_states.cu";
    return text;
}

Explanation explain(const MergeStatesParams& p, const Gpu&) { return describe(plan_merge_states(p)); }

}  // namespace octavo::cuda
