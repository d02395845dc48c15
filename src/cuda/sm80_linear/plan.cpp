#include "cuda/sm80_linear/plan.h"

#include "cuda/alignment.h"
#include "cuda/sm80_linear/tiles.h"

#include <algorithm>
#include <iterator>

namespace octavo::cuda {
namespace {

std::string instance(DType dtype, int32_t x_rows, bool in_pieces) {
    return text_of("sm80_linear<", to_string(dtype), ", ", x_rows, " rows", in_pieces ? "" : ", unaligned",
                   ">");
}

}  // namespace

Sm80LinearPlan plan_sm80_linear(const LinearParams& p) {
    Sm80LinearPlan plan{};
    plan.dtype = p.dtype;
    plan.x_rows = p.num_rows <= kSm80LinearXRows[0] ? kSm80LinearXRows[0] : kSm80LinearXRows[1];
    if (p.plan) plan.x_rows = p.plan->x_rows;
    // A copy of the last piece of a row reads no more than the row has, but compute-sanitizer takes it for
    // one of 16 bytes. The stride of rows makes room for these, if there are several.
    const bool has_room = p.w_rows() > 1 || p.depth * size_of(p.dtype) % 16 == 0;
    plan.in_pieces = has_room && aligned(p.w, 16, {p.w_stride}, p.dtype) &&
                     aligned(p.x, 16, {p.x_rows.strides[0]}, p.dtype);
    plan.w_tiles = ceil_divide(p.w_rows(), kSm80LinearWRows);
    plan.x_tiles = ceil_divide(p.num_rows, plan.x_rows);
    return plan;
}

bool is_sm80_plan(const LinearPlan& plan) {
    const bool has_instance = std::find(std::begin(kSm80LinearXRows), std::end(kSm80LinearXRows),
                                        plan.x_rows) != std::end(kSm80LinearXRows);
    return has_instance && plan.w_rows == kSm80LinearWRows && plan.splits == 1 && plan.ctas_per_sm == 1;
}

LinearPlan public_plan(const Sm80LinearPlan& plan) {
    return {LinearKernel::sm80_linear,  plan.dtype, kSm80LinearWRows, plan.x_rows, 1, 1,
            LinearPlanSource::estimated};
}

Explanation describe(const Sm80LinearPlan& plan) {
    Explanation text;
    text.kernel = instance(plan.dtype, plan.x_rows, plan.in_pieces);
    text.summary = text_of(counted(plan.w_tiles * plan.x_tiles, "CTA"), ", each ", kSm80LinearWRows,
                           " rows of w and ", plan.x_rows, " of x");
    text.file = "src/cuda/sm80_linear/kernel.cuh";
    text.plan = {
        {"dtype", to_string(plan.dtype)},          {"kernel", std::string("sm80_linear")},
        {"w_rows", int64_t{kSm80LinearWRows}},     {"x_rows", int64_t{plan.x_rows}},
        {"num_ctas", plan.w_tiles * plan.x_tiles}, {"in_pieces", plan.in_pieces},
    };
    return text;
}

std::vector<std::string> sm80_linear_instances() {
    std::vector<std::string> all;
    for (DType dtype : kAttentionTypes) {
        for (int32_t x_rows : kSm80LinearXRows) {
            for (bool in_pieces : {true, false}) all.push_back(instance(dtype, x_rows, in_pieces));
        }
    }
    return all;
}

}  // namespace octavo::cuda
