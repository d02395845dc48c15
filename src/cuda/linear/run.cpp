#include "cuda/linear/run.h"

#include "common/print_kernels.h"
#include "cuda/backend.h"
#include "cuda/linear/plan.h"
#include "cuda/runtime.h"

namespace octavo::cuda {

void linear(const LinearParams& p, void* stream) {
    if (p.num_rows == 0 || p.width == 0) return;
    const DeviceGuard guard(p.device.index);
    const LinearKernelPlan plan = plan_linear(p, gpu_of(p.device.index));
    std::visit(
        [&](const auto& plan) {
            if (prints_kernels()) print_kernel(describe(plan));
            run(p, plan, static_cast<cudaStream_t>(stream));
        },
        plan);
}

}  // namespace octavo::cuda
