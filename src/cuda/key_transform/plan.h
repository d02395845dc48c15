// The kernels that paged_attention runs before and after its own where keys were transformed before they
// became codes.
#pragma once

#include "cuda/plan.h"
#include "params/paged_attention_params.h"

#include <cstdint>

namespace octavo::cuda {

struct KeyTransformPlan {
    DType dtype;
    int64_t num_rows;     // (token, query head): transform_queries_kernel writes them to the workspace
    bool shifts_lse;      // whether shift_lse_kernel runs last
    bool adds_sinks;      // whether add_sinks_kernel runs in its place
    int64_t query_bytes;  // of the workspace: queries, the shifts of the LSE, and an LSE nobody asked for
    int64_t shift_bytes, lse_bytes;

    int64_t workspace_bytes() const { return query_bytes + shift_bytes + lse_bytes; }
};

KeyTransformPlan plan_key_transform(const PagedAttentionParams& params);

Explanation describe(const KeyTransformPlan& plan);

}  // namespace octavo::cuda
