// linear_plan(), which makes the plan of a call without its arrays.
#include "checks/check.h"
#include "checks/checks.h"
#include "common/fail.h"
#include "cuda/linear/plan.h"
#include "operators/find_device.h"

#include <octavo/linear.h>

#include <tuple>

namespace octavo {

std::string to_string(LinearKernel kernel) {
    switch (kernel) {
        case LinearKernel::library: return "library";
        case LinearKernel::sm80_linear: return "sm80_linear";
        case LinearKernel::sm90_flat: return "sm90_flat";
        case LinearKernel::sm90_wide: return "sm90_wide";
    }
    return "unknown kernel";
}

std::string to_string(LinearPlanSource source) {
    switch (source) {
        case LinearPlanSource::measured: return "measured";
        case LinearPlanSource::tuned: return "tuned";
        case LinearPlanSource::estimated: return "estimated";
    }
    return "unknown source";
}

std::string LinearPlan::to_string() const {
    std::string text = octavo::to_string(kernel) + "<" + octavo::to_string(dtype);
    if (kernel != LinearKernel::library) {
        text += ", " + std::to_string(w_rows) + "x" + std::to_string(x_rows) + ", splits " +
                std::to_string(splits) + ", CTAs per SM " + std::to_string(ctas_per_sm);
    }
    return text + "> (" + octavo::to_string(source) + ")";
}

bool operator==(const LinearPlan& a, const LinearPlan& b) {
    auto work = [](const LinearPlan& plan) {
        return std::tie(plan.kernel, plan.dtype, plan.w_rows, plan.x_rows, plan.splits, plan.ctas_per_sm);
    };
    return work(a) == work(b);
}

LinearPlan linear_plan(int64_t num_rows, int64_t w_rows, int64_t depth, DType dtype,
                       const std::string& device, std::optional<Activation> activation,
                       bool batch_invariant) {
    constexpr const char* op = "linear_plan";
    const Device meta{DeviceType::meta, 0};
    const Checker check(op, meta);
    check.length("the number of rows of x, M,", num_rows);
    check.length("the number of rows of w, N,", w_rows);
    check.length("the depth, K,", depth);
    const cuda::Gpu* const gpu = find_device(op, device.empty() ? "cuda:0" : device);
    if (!gpu) fail<ValueError>(op, "device must be a GPU; on the CPU one kernel computes all products");
    LinearArgs args;
    constexpr uintptr_t kAlignment = 256;
    uintptr_t address = kAlignment;
    auto array = [&](int64_t rows, int64_t columns) {  // behind the one before
        const TensorView view(reinterpret_cast<void*>(address), dtype, {rows, columns}, meta);
        address = (bytes_of(view).end / kAlignment + 1) * kAlignment;
        return view;
    };
    args.x = array(num_rows, depth);
    args.w = array(w_rows, depth);
    args.activation = activation;
    args.batch_invariant = batch_invariant;
    args.out = array(num_rows, linear_width(args));
    const LinearParams params = check_linear_for(op, args);
    const std::string why_not = why_refused_on_cuda(params);
    if (!why_not.empty()) fail<TypeError>(op, why_not);
    return cuda::public_plan(params, *gpu);
}

}  // namespace octavo
