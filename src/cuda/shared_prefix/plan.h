// How a batch whose sequences begin with the same pages would be worked through: all queries over the shared
// prefix, which is read once, each sequence's queries over its keys behind it, and the combination of both.
#pragma once

#include "cuda/attention/kernel_plan.h"

namespace octavo::cuda {

constexpr int32_t kMaxPrefixRuns = 32;  // a lane of combine_prefix_kernel each

struct SharedPrefixPlan {
    DType dtype;
    int32_t run_len;  // keys: the prefix is worked through in runs of so many, side by side
    int32_t num_runs;
    int64_t out_bytes, lse_bytes;  // of workspace: results over each run, and LSEs behind the prefix
    KernelPlan over_prefix, behind_prefix;

    int64_t workspace_bytes() const { return out_bytes + lse_bytes; }
};

// For a shared_prefix_len above 0.
SharedPrefixPlan plan_shared_prefix(const AttentionParams& params, const Gpu& gpu);

Explanation describe(const SharedPrefixPlan& plan);
inline bool operator==(const SharedPrefixPlan& a, const SharedPrefixPlan& b) {
    return describe(a).plan == describe(b).plan && a.over_prefix == b.over_prefix &&
           a.behind_prefix == b.behind_prefix;
}

}  // namespace octavo::cuda
