// How drafts over pages of codes would be worked through by the decode kernels, which take few rows of a KV
// head: the first of two launches makes parts of each sequence, with few of its queries each, and the second
// one decodes these as sequences of their own.
#pragma once

#include "cuda/decode/plan.h"
#include "cuda/gpu.h"
#include "cuda/plan.h"
#include "params/attention_params.h"

#include <optional>
#include <string>

namespace octavo::cuda {

constexpr int32_t kDivideThreads = 128;  // in a CTA
constexpr int32_t kMostParts = 32;       // of a sequence
// If the copies of page_table would take more workspace, sequences are not divided.
constexpr int64_t kMaxDividedBytes = int64_t{64} << 20;

struct DividedPlan {
    int32_t num_sequences;  // the first sequences of the batch; another plan is made for the others
    int32_t parts;          // of each sequence
    int32_t part_queries;   // the most queries of a part
    int32_t max_pages;      // columns of page_table
    DecodePlan decode;      // the plan of attention over the parts

    Grid grid() const { return {num_sequences}; }
    int32_t threads() const { return kDivideThreads; }
    // Leaves out the workspace of the decode kernel, which takes its own.
    int64_t workspace_bytes() const;
};

// Returns nothing where this way does not serve, or takes longer than the kernels that take all queries at
// once; why_not, unless null, then gets the reason.
std::optional<DividedPlan> plan_divided_queries(const AttentionParams& params, const Gpu& gpu,
                                                std::string* why_not = nullptr);
// Makes the plan whether it pays or not.
std::optional<DividedPlan> make_divided_plan(const AttentionParams& params, const Gpu& gpu,
                                             std::string* why_not = nullptr);

// The call of attention over the parts. Their lengths, offsets and pages lie in the workspace, in this order;
// a sequence's parts follow one another.
AttentionParams over_parts(const AttentionParams& params, int32_t parts, int32_t part_queries,
                           void* workspace);

Explanation describe(const DividedPlan& plan);
inline bool operator==(const DividedPlan& a, const DividedPlan& b) {
    return describe(a).plan == describe(b).plan && a.decode == b.decode;
}

}  // namespace octavo::cuda
