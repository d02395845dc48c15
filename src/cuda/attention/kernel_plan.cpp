#include "cuda/attention/kernel_plan.h"

#include "common/fail.h"

namespace octavo::cuda {

KernelPlan plan_kernel(const AttentionParams& p, const Gpu& gpu) {
    if (auto plan = plan_split_kv(p, gpu)) return *plan;
    if (p.chosen_pages) {
        std::string why_not;
        plan_split_kv(p, gpu, &why_not);
        fail<ValueError>(
            p.op,
            "chosen_pages on a GPU are read by split_kv_decode, which cannot serve this call: ", why_not);
    }
    if (auto plan = plan_stream_k(p, gpu)) return *plan;
    if (auto plan = plan_expanded_attention(p, gpu)) return *plan;
    if (auto plan = plan_divided_queries(p, gpu)) return *plan;
    if (auto plan = plan_sm90_attention(p, gpu)) return *plan;
    if (auto plan = plan_sm90_wide_attention(p, gpu)) return *plan;
    return plan_sm80_attention(p, gpu);
}

KernelPlan plan_rest(const AttentionParams& p, const Gpu& gpu) {
    const KernelPlan plan = plan_kernel(p, gpu);
    const auto* const sm80 = std::get_if<Sm80Plan>(&plan);
    if (!sm80 || sm80->num_splits == 1 || !p.cu_seqlens_q) return plan;
    // combine_splits_kernel writes the rows of all tokens before the batch's last one, and no split has those
    // of earlier sequences.
    AttentionParams whole = p;
    whole.num_splits = 1;
    return plan_sm80_attention(whole, gpu);
}

int32_t num_sequences(const KernelPlan& plan) {
    return std::visit([](const auto& plan) { return plan.num_sequences; }, plan);
}

Explanation describe(const KernelPlan& plan) {
    return std::visit([](const auto& plan) { return describe(plan); }, plan);
}

}  // namespace octavo::cuda
