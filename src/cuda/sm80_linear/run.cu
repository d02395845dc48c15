#include "cuda/launch.cuh"
#include "cuda/linear/run.h"
#include "cuda/sm80_linear/kernel.cuh"
#include "cuda/sm80_linear/plan.h"

namespace octavo::cuda {
namespace {

template <class T, int kXRows, bool kInPieces>
void launch_as(const LinearParams& p, const Sm80LinearPlan& plan, const Sm80LinearLaunch& arguments,
               cudaStream_t stream) {
    using Config = Sm80LinearConfig<kXRows>;
    const LaunchShape shape{dim3(static_cast<unsigned>(plan.w_tiles * plan.x_tiles)), Config::kConsumers,
                            true};
    constexpr size_t kSharedBytes = kSm80LinearSharedBytes<Config>;
    launch<sm80_linear_kernel<T, Config, kInPieces>, kSharedBytes>("linear", p.device.index, stream, shape,
                                                                   arguments);
}

template <class T, int kXRows>
void launch_of(const LinearParams& p, const Sm80LinearPlan& plan, const Sm80LinearLaunch& arguments,
               cudaStream_t stream) {
    if (plan.in_pieces) return launch_as<T, kXRows, true>(p, plan, arguments, stream);
    launch_as<T, kXRows, false>(p, plan, arguments, stream);
}

}  // namespace

void run(const LinearParams& p, const Sm80LinearPlan& plan, cudaStream_t stream) {
    const Sm80LinearLaunch arguments{p.w,
                                     p.x,
                                     p.w_stride,
                                     p.x_rows.strides[0],
                                     p.depth,
                                     static_cast<uint32_t>(plan.x_tiles),
                                     kSm80LinearWRows / (p.is_gated() ? 2 : 1),
                                     p.static_weight,
                                     output_of(p)};
    auto launch_type = [&](auto type) {
        using T = decltype(type);
        if (plan.x_rows == kSm80LinearXRows[0])
            return launch_of<T, kSm80LinearXRows[0]>(p, plan, arguments, stream);
        launch_of<T, kSm80LinearXRows[1]>(p, plan, arguments, stream);
    };
    if (plan.dtype == DType::float16) return launch_type(float16{});
    launch_type(bfloat16{});
}

}  // namespace octavo::cuda
