#include "cuda/cache/plan.h"

#include "cuda/alignment.h"
#include "cuda/backend.h"
#include "cuda/warp_rows.h"

#include <algorithm>

namespace octavo::cuda {
namespace {

Explanation describe_rotary(const AppendKvPlan& plan) {
    Explanation text;
    text.kernel = text_of("append_rotary_kernel<", to_string(plan.dtype), ">");
    text.summary = text_of(counted(plan.num_rows, "token"), ", ", counted(plan.ctas_per_token, "CTA"), " of ",
                           kRotaryThreads, " threads each",
                           plan.in_chunks ? ", 16 bytes at a time" : ", a number at a time");
    text.file = "src/cuda/cache/append_rotary.cu";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"num_rows", plan.num_rows},
        {"num_ctas", plan.num_rows * plan.ctas_per_token},
        {"threads", int64_t{kRotaryThreads}},
        {"in_chunks", plan.in_chunks},
        {"rotary", true},
    };
    return text;
}

}  // namespace

AppendKvPlan plan_append_kv(const AppendKvParams& p) {
    AppendKvPlan plan{p.dtype, p.k_dtype, p.v_dtype, 0, false, p.has_rotary(), 0, 0};
    const int64_t heads = int64_t{p.num_kv_heads} + p.num_q_heads;
    const int32_t longest_row = std::max(p.head_dim, p.head_dim_v);
    if (heads == 0 || longest_row == 0) return plan;
    plan.num_rows = plan.has_codes() ? p.total * heads : p.total;
    if (plan.has_codes()) return plan;
    const auto wide = static_cast<int32_t>(16 / size_of(p.dtype));
    plan.in_chunks =
        p.head_dim % wide == 0 && p.head_dim_v % wide == 0 &&
        aligned(p.k, 16, {p.k_token_stride, p.k_head_stride}, p.dtype) &&
        aligned(p.k_pages, 16, {p.k_page_stride, p.k_slot_stride, p.k_pages_head_stride}, p.dtype) &&
        aligned(p.v, 16, {p.v_token_stride, p.v_head_stride}, p.dtype) &&
        aligned(p.v_pages, 16, {p.v_page_stride, p.v_slot_stride, p.v_pages_head_stride}, p.dtype);
    if (!plan.has_rotary) {
        plan.in_chunks = plan.in_chunks && p.k_scale == 1.0f && p.v_scale == 1.0f;
        return plan;
    }
    const int64_t angle_bytes = wide * size_of(p.rotary.dtype);
    plan.in_chunks = plan.in_chunks && p.rotary.dim / 2 % wide == 0 &&
                     aligned(p.rotary.cos, angle_bytes, {p.rotary.cos_stride}, p.rotary.dtype) &&
                     aligned(p.rotary.sin, angle_bytes, {p.rotary.sin_stride}, p.rotary.dtype) &&
                     aligned(p.q, 16, {p.q_token_stride, p.q_head_stride}, p.dtype) &&
                     aligned(p.q_out, 16, {p.q_out_token_stride, p.q_out_head_stride}, p.dtype);
    plan.units_per_row = static_cast<int32_t>(ceil_divide(longest_row, 2 * (plan.in_chunks ? wide : 1)));
    plan.ctas_per_token =
        static_cast<int32_t>(ceil_divide((p.num_kv_heads + heads) * plan.units_per_row, kRotaryThreads));
    return plan;
}

CopyPagesPlan plan_copy_pages(const CopyPagesParams& p) {
    auto rows_aligned = [&p](const CopyPagesParams::Pages& pages, int32_t row_bytes) {
        return row_bytes % 16 == 0 &&
               aligned(pages.data, 16, {pages.page_stride, pages.slot_stride, pages.head_stride}, p.dtype);
    };
    return {p.dtype, p.num_copies * p.page_size * p.num_kv_heads,
            rows_aligned(p.from_k, p.k_row_bytes) && rows_aligned(p.to_k, p.k_row_bytes),
            rows_aligned(p.from_v, p.v_row_bytes) && rows_aligned(p.to_v, p.v_row_bytes)};
}

Explanation describe(const AppendKvPlan& plan) {
    if (plan.has_codes()) {
        Explanation text = describe_warp_rows("append_codes_kernel", plan.dtype, plan.num_rows, "row");
        text.summary += plan.has_rotary ? ", of one token and head each" : ", of one token and KV head each";
        text.file = "src/cuda/cache/append_codes.cu";
        text.plan.emplace_back("k_dtype", to_string(plan.k_dtype));
        text.plan.emplace_back("v_dtype", to_string(plan.v_dtype));
        text.plan.emplace_back("rotary", plan.has_rotary);
        return text;
    }
    if (plan.has_rotary) return describe_rotary(plan);
    Explanation text = describe_warp_rows("append_kv_kernel", plan.dtype, plan.num_rows, "token");
    text.summary += plan.in_chunks ? ", 16 bytes at a time" : ", a number at a time";
    text.file = "src/cuda/cache/append_kv.cu";
    text.plan.emplace_back("in_chunks", plan.in_chunks);
    text.plan.emplace_back("rotary", false);
    return text;
}

Explanation describe(const CopyPagesPlan& plan) {
    Explanation text = describe_warp_rows("copy_pages_kernel", plan.dtype, plan.num_rows, "row");
    const bool both = plan.k_aligned && plan.v_aligned, none = !plan.k_aligned && !plan.v_aligned;
    text.summary += both   ? ", 16 bytes at a time"
                    : none ? ", a number at a time"
                           : ", those of one array 16 bytes at a time, of the other a number";
    text.file = "src/cuda/cache/copy_pages.cu";
    text.plan.emplace_back("k_aligned", plan.k_aligned);
    text.plan.emplace_back("v_aligned", plan.v_aligned);
    return text;
}

Explanation explain(const AppendKvParams& p, const Gpu&) { return describe(plan_append_kv(p)); }
Explanation explain(const CopyPagesParams& p, const Gpu&) { return describe(plan_copy_pages(p)); }

}  // namespace octavo::cuda
