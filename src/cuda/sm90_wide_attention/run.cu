#include "cuda/attention/run.h"
#include "cuda/sm90_attention/launch_arguments.h"
#include "cuda/types.h"
#include "cuda/workspace.h"

namespace octavo::cuda {

// One for each type, compiled from instance.cu.in.
template <class T>
void launch_sm90_wide_attention(const AttentionParams&, const Sm90WidePlan&, const Sm90Launch&, cudaStream_t);

namespace {

template <class T>
void launch(const AttentionParams& p, const Sm90WidePlan& plan, const Sm90Launch& arguments,
            cudaStream_t stream) {
    if constexpr (OCTAVO_HAS_SM90_KERNELS) launch_sm90_wide_attention<T>(p, plan, arguments, stream);
}

}  // namespace

void run(const AttentionParams& p, const Sm90WidePlan& plan, cudaStream_t stream) {
    Sm90Launch arguments = launch_arguments(p, plan);
    arguments.num_whole = INT32_MAX;
    arguments.counter =
        reinterpret_cast<int32_t*>(persistent_workspace(p.device.index, stream, 0, 1).counters);
    (plan.dtype == DType::float16 ? launch<float16> : launch<bfloat16>)(p, plan, arguments, stream);
}

}  // namespace octavo::cuda
