// Launches the kernels of one row of kSm90BackwardTiles and one feature, in the order in which they need each
// other.
#pragma once

#include "cuda/attention_backward/run.h"
#include "cuda/attention_backward/slope_gradients.cuh"
#include "cuda/launch.cuh"
#include "cuda/sm90_backward/convert.cuh"
#include "cuda/sm90_backward/kernel.cuh"
#include "cuda/sm90_backward/plan.h"
#include "cuda/sm90_backward/prepare.cuh"
#include "cuda/sm90_backward/query_gradients.cuh"

namespace octavo::cuda {

template <class T, int kRow, Sm90BackwardFeature kFeature>
void launch_sm90_backward(const AttentionBackwardParams& p, const Sm90BackwardPlan& plan,
                          const Sm90BackwardLaunch& arguments, cudaStream_t stream) {
    using Config = Sm90BackwardConfig<kRow, kFeature>;
    constexpr size_t kSharedBytes = sizeof(Sm90BackwardShared<Config>);
    static_assert(kSharedBytes <= 227 * 1024);
    const int32_t device = p.device.index;
    const LaunchShape rows{dim3(blocks_for_rows(plan.num_rows / kPreparedRows<Config>), p.num_q_heads),
                           32 * kRowsPerBlock, true};
    launch<prepare_backward_kernel<T, Config>>(p.op, device, stream, rows, p, arguments);
    if (p.dsinks) launch_sink_gradients(p, arguments.sinks, stream);
    const LaunchShape keys{dim3(plan.num_ctas), Config::kThreads, true, Config::kCtas};
    launch<sm90_backward_kernel<T, Config>, kSharedBytes>(p.op, device, stream, keys, p, arguments);
    if constexpr (Config::kDqApart) {
        const LaunchShape queries{dim3(static_cast<unsigned>(plan.query_order.num_ctas())),
                                  128 * (1 + kSm90GradientGroups), true};
        launch<sm90_query_gradients_kernel<T, Config>, sizeof(Sm90QueryGradientsShared<Config>)>(
            p.op, device, stream, queries, p, arguments);
    } else if constexpr (!Config::kBeside) {
        const LaunchShape tiles{dim3(static_cast<unsigned>(plan.num_rows / Config::kQueries), p.num_q_heads),
                                128 * Config::kDqParts, true};
        launch<convert_dq_kernel<T, Config>>(p.op, device, stream, tiles, p, arguments);
    }
    if (Config::kAlibi && p.dalibi_slopes)
        launch_slope_gradients<true, Config::kKeys, Config::kConsumerWarps>(p, arguments.slopes, stream);
}

}  // namespace octavo::cuda
