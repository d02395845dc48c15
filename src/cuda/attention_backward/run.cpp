#include "cuda/attention_backward/run.h"

#include "common/print_kernels.h"
#include "cuda/attention_backward/plan.h"
#include "cuda/backend.h"
#include "cuda/runtime.h"

namespace octavo::cuda {

void attention_backward(const AttentionBackwardParams& p, void* stream) {
    const DeviceGuard guard(p.device.index);
    const BackwardPlan plan = plan_attention_backward(p, gpu_of(p.device.index));
    std::visit(
        [&](const auto& plan) {
            if (prints_kernels()) print_kernel(describe(plan));
            run(p, plan, static_cast<cudaStream_t>(stream));
        },
        plan);
    clear_padding(padding_of(p), p.device.index, stream);
}

}  // namespace octavo::cuda
