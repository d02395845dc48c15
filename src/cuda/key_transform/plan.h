// What paged_attention does around its kernels where keys were transformed before they became codes.
#pragma once

#include "cuda/plan.h"
#include "params/paged_attention_params.h"

#include <cstdint>

namespace octavo::cuda {

struct KeyTransformPlan {
    DType dtype;
    int64_t num_rows;     // queries of one head, which transform_queries_kernel writes to workspace
    bool shifts_lse;      // and shift_lse_kernel ends with
    bool adds_sinks;      // which add_sinks_kernel does in its place
    int64_t query_bytes;  // workspace: queries, what the LSE is shifted by, and an LSE that nobody asked for
    int64_t shift_bytes, lse_bytes;

    int64_t workspace_bytes() const { return query_bytes + shift_bytes + lse_bytes; }
};

KeyTransformPlan plan_key_transform(const PagedAttentionParams& params);

Explanation describe(const KeyTransformPlan& plan);

}  // namespace octavo::cuda
