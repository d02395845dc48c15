#include "cuda/linear/run.h"

#include "common/print_kernels.h"
#include "cuda/backend.h"
#include "cuda/linear/plan.h"
#include "cuda/runtime.h"
#include "cuda/workspace.h"

namespace octavo::cuda {

void linear(const LinearParams& p, void* stream) {
    if (p.num_rows == 0 || p.width == 0) return;
    const DeviceGuard guard(p.device.index);
    const LinearKernelPlan plan = plan_linear(p, gpu_of(p.device.index));
    auto run_plan = [&](const LinearParams& p) {
        std::visit(
            [&](const auto& plan) {
                if (prints_kernels()) print_kernel(describe(plan));
                run(p, plan, static_cast<cudaStream_t>(stream));
            },
            plan);
    };
    if (!p.norm_weight || normalises(plan)) return run_plan(p);
    const int64_t stride = normalised_stride(p);
    const Workspace memory(p.device.index, p.num_rows * stride * size_of(p.dtype),
                           static_cast<cudaStream_t>(stream), WorkspaceUser::normalised_rows);
    const NormalisedRows rows{memory.bytes(), stride};
    rms_norm(norm_of(p, rows), stream);
    run_plan(behind_norm(p, rows));
}

}  // namespace octavo::cuda
