#include "cuda/cache/plan.h"

#include "cuda/alignment.h"
#include "cuda/backend.h"
#include "cuda/warp_rows.h"

namespace octavo::cuda {

AppendKvPlan plan_append_kv(const AppendKvParams& p) {
    const bool is_empty = p.num_kv_heads == 0 || p.head_dim == 0;
    if (is_code(p.k_dtype))
        return {p.dtype, p.k_dtype, p.v_dtype, is_empty ? 0 : p.total * p.num_kv_heads, false};
    const bool in_chunks =
        p.head_dim % (16 / size_of(p.dtype)) == 0 && p.k_scale == 1.0f && p.v_scale == 1.0f &&
        aligned(p.k, 16, {p.k_token_stride, p.k_head_stride}, p.dtype) &&
        aligned(p.k_pages, 16, {p.k_page_stride, p.k_slot_stride, p.k_pages_head_stride}, p.dtype) &&
        aligned(p.v, 16, {p.v_token_stride, p.v_head_stride}, p.dtype) &&
        aligned(p.v_pages, 16, {p.v_page_stride, p.v_slot_stride, p.v_pages_head_stride}, p.dtype);
    return {p.dtype, p.k_dtype, p.v_dtype, is_empty ? 0 : p.total, in_chunks};
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
        text.summary += ", of one token and KV head each";
        text.file = "src/cuda/cache/append_codes.cu";
        text.plan.emplace_back("k_dtype", to_string(plan.k_dtype));
        text.plan.emplace_back("v_dtype", to_string(plan.v_dtype));
        return text;
    }
    Explanation text = describe_warp_rows("append_kv_kernel", plan.dtype, plan.num_rows, "token");
    text.summary += plan.in_chunks ? ", 16 bytes at a time" : ", a number at a time";
    text.file = "src/cuda/cache/append_kv.cu";
    text.plan.emplace_back("in_chunks", plan.in_chunks);
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
