#include "cuda/rms_norm/plan.h"

#include "cuda/alignment.h"
#include "cuda/backend.h"
#include "cuda/warp_rows.h"

#include <algorithm>

namespace octavo::cuda {
namespace {

bool moves_in_chunks(const RmsNormParams& p) {
    auto rows_aligned = [&p](const void* rows, const int64_t (&strides)[3]) {
        return aligned(rows, 16, {strides[0], strides[1], strides[2]}, p.dtype);
    };
    return p.dim % (16 / size_of(p.dtype)) == 0 && rows_aligned(p.x, p.x_strides) &&
           rows_aligned(p.residual, p.residual_strides) && aligned(p.weight, 16, {}, p.weight_dtype) &&
           rows_aligned(p.out, p.out_strides) && rows_aligned(p.residual_out, p.residual_out_strides);
}

}  // namespace

int64_t RmsNormPlan::num_ctas() const { return is_warp_each() ? blocks_for_rows(num_rows) : num_rows; }

int32_t RmsNormPlan::threads() const { return is_warp_each() ? 32 * kRowsPerBlock : threads_per_row; }

RmsNormPlan plan_rms_norm(const RmsNormParams& p) {
    const bool in_chunks = moves_in_chunks(p);
    const int64_t pieces = in_chunks ? p.dim / (16 / size_of(p.dtype)) : p.dim;
    // A thread takes as few pieces as the largest number of threads allows, and a CTA has as few warps as
    // this takes.
    const int64_t pieces_per_thread = std::max<int64_t>(1, ceil_divide(pieces, kRmsNormMaxThreads));
    const int64_t warps = std::clamp<int64_t>(ceil_divide(pieces, pieces_per_thread * 32), 1, 32);
    return {p.dtype,  p.weight_dtype, p.dim == 0 ? 0 : p.num_rows(), p.dim, static_cast<int32_t>(32 * warps),
            in_chunks};
}

Explanation describe(const RmsNormPlan& plan) {
    Explanation text;
    const std::string weight =
        plan.weight_dtype == plan.dtype ? "" : ", weight " + to_string(plan.weight_dtype);
    text.kernel = text_of("rms_norm_kernel<", to_string(plan.dtype), weight, ">");
    text.summary = text_of(counted(plan.num_rows, "row"), ", ", plan.threads_per_row, " threads each",
                           plan.in_chunks ? ", 16 bytes at a time" : ", a number at a time");
    text.file = "src/cuda/rms_norm/rms_norm.cu";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"num_rows", plan.num_rows},
        {"num_ctas", plan.num_ctas()},
        {"threads", int64_t{plan.threads()}},
        {"threads_per_row", int64_t{plan.threads_per_row}},
        {"in_chunks", plan.in_chunks},
    };
    return text;
}

Explanation explain(const RmsNormParams& p, const Gpu&) { return describe(plan_rms_norm(p)); }

}  // namespace octavo::cuda
