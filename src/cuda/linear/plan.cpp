#include "cuda/linear/plan.h"

#include "checks/checks.h"
#include "common/fail.h"
#include "cuda/backend.h"
#include "cuda/linear/library.h"
#include "cuda/sm90_linear/choice.h"

#include <tuple>

namespace octavo::cuda {
namespace {

// sm80_linear reads the weights again for every 16 rows.
constexpr int64_t kSm80MostRows = 16;

LinearKernelPlan plan_given(const LinearParams& p, const Gpu& gpu) {
    std::string why_not = "sm80_linear has no instance of this tile";
    if (p.plan->kernel == LinearKernel::sm80_linear) {
        if (is_sm80_plan(*p.plan)) return plan_sm80_linear(p);
    } else if (const auto plan = plan_sm90_linear(p, gpu, &why_not)) {
        return *plan;
    }
    fail<ValueError>("linear", "plan ", p.plan->to_string(), " does not serve this call: ", why_not);
}

// Refuses a plan whose order of addition is not that of batch-invariant calls: the order follows from the
// kernel, the rows of w in a tile and the splits.
void require_invariant(const LinearParams& p, const Gpu& gpu) {
    LinearParams own = p;
    own.plan.reset();
    const LinearPlan wanted = public_plan(own, gpu);
    if (std::tuple(p.plan->kernel, p.plan->w_rows, p.plan->splits) ==
        std::tuple(wanted.kernel, wanted.w_rows, wanted.splits))
        return;
    fail<ValueError>("linear", "plan must be that of linear_plan(..., batch_invariant=True), ",
                     wanted.to_string(), ", with batch_invariant; got ", p.plan->to_string());
}

// The call behind rms_norm, whose result is in workspace.
LinearParams behind_norm(const LinearParams& p) {
    return octavo::behind_norm(p, {kSomeWorkspace, normalised_stride(p)});
}

// Whether one launch does both, of a call that has x normalised; why_not, unless null, gets the reason if
// not.
bool normalises_at_once(const LinearParams& p, const Gpu& gpu, std::string* why_not = nullptr) {
    if (p.plan && p.plan->kernel != LinearKernel::sm90_flat) {
        refuse(why_not, "the plan of the call names another kernel");
        return false;
    }
    return plan_sm90_linear(p, gpu, why_not).has_value();
}

std::string why_library_by(const std::optional<FoundRow>& row, int64_t num_rows, int64_t most_rows) {
    if (row) {
        if (!row->row.library_is_faster) return {};
        return text_of("for up to ", row->row.num_rows, " rows of x it was the faster one where they were ",
                       to_string(row->source));
    }
    if (num_rows <= most_rows) return {};
    return text_of("with more than ", most_rows, " rows of x it is the faster one");
}

}  // namespace

bool normalises(const LinearKernelPlan& plan) {
    const auto* const sm90 = std::get_if<Sm90LinearPlan>(&plan);
    return sm90 && sm90->normalises;
}

int64_t normalised_stride(const LinearParams& p) {
    const int64_t numbers = 16 / size_of(p.dtype);
    return ceil_divide(p.depth, numbers) * numbers;
}

LinearKernelPlan plan_linear(const LinearParams& p, const Gpu& gpu) {
    if (p.norm_weight && !normalises_at_once(p, gpu)) return plan_linear(behind_norm(p), gpu);
    if (p.plan) {
        if (p.batch_invariant) require_invariant(p, gpu);
        return plan_given(p, gpu);
    }
    if (const auto plan = plan_sm90_linear(p, gpu)) return *plan;
    return plan_sm80_linear(p);
}

std::string why_library(const LinearParams& p, const Gpu& gpu) {
    const std::string why_no_kernel = why_no_cuda_kernel(p);
    if (!why_no_kernel.empty()) return why_no_kernel;
    if (p.norm_weight) return why_library(behind_norm(p), gpu);
    if (p.plan) return p.plan->kernel == LinearKernel::library ? "the plan of the call says so" : "";
    if (p.batch_invariant) return {};
    const LinearProblem problem = linear_problem(p);
    std::string why_not_sm90;
    if (const auto plan = plan_sm90_linear(p, gpu, &why_not_sm90)) {
        if (!plan->library_is_faster) return {};
        return why_library_by(find_table_row(problem, p.dtype, gpu), p.num_rows, kSm90MostRows);
    }
    if (gpu.has_sm90_kernels) return "sm90_linear does not serve this call: " + why_not_sm90;
    return why_library_by(find_table_row(problem, p.dtype, gpu), p.num_rows, kSm80MostRows);
}

int64_t most_rows_without_table(const Gpu& gpu) {
    return gpu.has_sm90_kernels ? kSm90MostRows : kSm80MostRows;
}

LinearPlan public_plan(const LinearParams& p, const Gpu& gpu) {
    if (!why_library(p, gpu).empty()) {
        LinearPlan plan;
        plan.dtype = p.dtype;
        if (const auto row = find_table_row(linear_problem(p), p.dtype, gpu)) plan.source = row->source;
        return plan;
    }
    return std::visit([](const auto& plan) { return public_plan(plan); }, plan_linear(p, gpu));
}

std::vector<std::pair<LinearPlan, double>> linear_candidates(const LinearProblem& problem, DType dtype,
                                                             const Gpu& gpu) {
    if (gpu.has_sm90_kernels) return sm90_linear_candidates(problem, dtype, gpu);
    LinearParams p{};
    p.dtype = dtype;
    p.num_rows = problem.num_rows;
    return {{public_plan(plan_sm80_linear(p)), 0.0}};
}

namespace {

Explanation explain_kernel(const LinearParams& p, const Gpu& gpu) {
    std::string why_not;
    if (p.norm_weight && !normalises_at_once(p, gpu, &why_not)) {
        Explanation text = explain_kernel(behind_norm(p), gpu);
        text.summary += "; rms_norm normalises x before";
        text.plan.emplace_back("norm", std::string("rms_norm"));
        text.why_not.emplace_back("sm90_flat that normalises x", why_not);
        return text;
    }
    if (p.plan) {
        Explanation text = std::visit([](const auto& plan) { return describe(plan); }, plan_linear(p, gpu));
        text.why_not.emplace_back("other kernels", "the plan of the call says so");
        return text;
    }
    std::string why_not_sm90;
    if (const auto plan = plan_sm90_linear(p, gpu, &why_not_sm90)) {
        Explanation text = describe(*plan);
        text.why_not.emplace_back("sm80_linear",
                                  "it could serve this call, but sm90_linear is faster where both can");
        return text;
    }
    Explanation text = describe(plan_sm80_linear(p));
    text.why_not.emplace_back("sm90_linear", why_not_sm90);
    return text;
}

}  // namespace

Explanation explain(const LinearParams& p, const Gpu& gpu) {
    const std::string why = why_library(p, gpu);
    if (why.empty()) return explain_kernel(p, gpu);
    Explanation text;
    text.kernel = "matmul of the arrays' library<" + to_string(p.dtype) + ">";
    text.summary =
        std::string(p.norm_weight ? "rms_norm, " : "") +
        "torch.nn.functional.linear, cupy.matmul or jax.numpy.matmul, then bias, activation and residual: " +
        why;
    text.file = "python/octavo/_linear_on_cuda.py";
    text.plan = {{"dtype", to_string(p.dtype)}, {"kernel", std::string("library")}};
    const bool has_kernel = why_no_cuda_kernel(p).empty();
    LinearParams own = p;
    own.plan.reset();
    text.why_not = {{has_kernel ? explain_kernel(own, gpu).kernel : "CUDA kernels",
                     has_kernel ? "C++ and C run it, which have no library to hand over to" : why}};
    return text;
}

std::vector<std::string> linear_instances(bool with_sm90) {
    std::vector<std::string> names = sm80_linear_instances();
    if (!with_sm90) return names;
    for (std::string& name : sm90_linear_instances()) names.push_back(std::move(name));
    return names;
}

}  // namespace octavo::cuda
