// How a batch whose sequences begin with the same pages would be worked through: one kernel runs all queries
// over the shared prefix, which it reads once, another one runs each sequence's queries over its keys behind
// the prefix, and a third combines both.
#pragma once

#include "cuda/attention/kernel_plan.h"

#include <optional>
#include <string>

namespace octavo::cuda {

constexpr int32_t kMaxPrefixRuns = 32;  // one for each lane of combine_prefix_kernel

struct SharedPrefixPlan {
    DType dtype;
    int32_t run_len;  // keys in each of the runs that the prefix is cut into
    int32_t num_runs;
    int64_t out_bytes, lse_bytes;  // of the workspace: results over each run, and behind the prefix
    KernelPlan over_prefix, behind_prefix;
    // Whether the kernel over the keys behind the prefix runs beside the one over the prefix, which then
    // leaves room on every SM, and lets the other start once all kernels before both are complete.
    bool overlaps;

    int64_t workspace_bytes() const { return out_bytes + lse_bytes; }
};

// Returns nothing if the plain call, which reads the prefix once for each sequence, takes no longer. why_not,
// unless null, then gets the reason.
std::optional<SharedPrefixPlan> plan_shared_prefix(const AttentionParams& params, const Gpu& gpu,
                                                   std::string* why_not = nullptr);
// Makes the plan whether it pays or not. shared_prefix_len must be above 0.
SharedPrefixPlan make_shared_prefix_plan(const AttentionParams& params, const Gpu& gpu);

Explanation describe(const SharedPrefixPlan& plan);
inline bool operator==(const SharedPrefixPlan& a, const SharedPrefixPlan& b) {
    return describe(a).plan == describe(b).plan && a.over_prefix == b.over_prefix &&
           a.behind_prefix == b.behind_prefix;
}

}  // namespace octavo::cuda
