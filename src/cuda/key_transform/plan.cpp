#include "cuda/key_transform/plan.h"

#include "cuda/backend.h"
#include "cuda/warp_rows.h"

namespace octavo::cuda {

KeyTransformPlan plan_key_transform(const PagedAttentionParams& p) {
    constexpr int64_t kAlignment = 256;  // bytes; the shifts behind the queries begin at a multiple of it
    KeyTransformPlan plan{};
    plan.dtype = p.dtype;
    plan.num_rows = p.total_q * p.num_q_heads;
    plan.shifts_lse = p.shifts_lse();
    plan.query_bytes = ceil_divide(plan.num_rows * p.head_dim * size_of(p.dtype), kAlignment) * kAlignment;
    plan.adds_sinks = p.adds_sinks();
    plan.shift_bytes = plan.shifts_lse ? plan.num_rows * int64_t{sizeof(float)} : 0;
    plan.lse_bytes = plan.adds_sinks && !p.lse ? plan.shift_bytes : 0;
    return plan;
}

Explanation describe(const KeyTransformPlan& plan) {
    Explanation text = describe_warp_rows("transform_queries_kernel", plan.dtype, plan.num_rows, "row");
    const char* const behind = plan.adds_sinks ? "add_sinks_kernel" : "shift_lse_kernel";
    if (plan.shifts_lse) text.summary += text_of("; ", behind, " behind the attention");
    text.file = "src/cuda/key_transform/transform_queries.cu";
    text.plan.emplace_back("shifts_lse", plan.shifts_lse);
    text.plan.emplace_back("adds_sinks", plan.adds_sinks);
    return text;
}

Explanation explain(const PagedAttentionParams& p, const Gpu& gpu) {
    if (p.key_transform.is_identity()) return explain(static_cast<const AttentionParams&>(p), gpu);
    Explanation text = explain(p.with_queries(kSomeWorkspace, static_cast<float*>(kSomeWorkspace)), gpu);
    const Explanation around = describe(plan_key_transform(p));
    text.summary += "; before it, " + around.kernel + ": " + around.summary;
    return text;
}

}  // namespace octavo::cuda
