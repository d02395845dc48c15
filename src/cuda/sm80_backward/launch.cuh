// Launches the instances of one row of kSm80BackwardTiles.
#pragma once

#include "cuda/attention_backward/run.h"
#include "cuda/attention_backward/slope_gradients.cuh"
#include "cuda/launch.cuh"
#include "cuda/sm80_backward/key_gradients.cuh"
#include "cuda/sm80_backward/plan.h"
#include "cuda/sm80_backward/prepare.cuh"
#include "cuda/sm80_backward/query_gradients.cuh"

namespace octavo::cuda {

// The kernel of the keys; then the conversion of its sums of dQ, or the kernel of the queries. With kBlocks
// or kRanges, dropout is a branch in the kernels.
template <class T, int kRow, bool kDropout, bool kBlocks, bool kRanges, bool kDqSums = false>
void launch_sm80_gradients(const AttentionBackwardParams& p, const Sm80BackwardPlan& plan,
                           const Sm80BackwardLaunch& arguments, cudaStream_t stream) {
    constexpr Sm80BackwardTiles kTiles = kSm80BackwardTiles[kRow];
    constexpr Sm80BackwardSide kKeys = kTiles.keys, kQueries = kTiles.queries;
    using KeyConfig = BackwardConfig<kTiles.head_dim, kKeys.warps, kKeys.row_tiles, kKeys.columns,
                                     kKeys.stages, kKeys.parts, kKeys.ds_slots>;
    using KeyShared = KeyGradientsShared<T, KeyConfig, kDropout, kDqSums>;
    static_assert(sizeof(KeyShared) <=
                  sm80_backward_shared_bytes(kTiles.head_dim, kKeys) + sm80_backward_ds_bytes(kKeys));
    if (plan.num_key_tiles > 0) {
        const dim3 grid(static_cast<unsigned>(plan.key_order.num_ctas()));
        launch<key_gradients_kernel<T, KeyConfig, kKeys.ctas_per_sm, kDropout, kBlocks, kRanges, kDqSums>,
               sizeof(KeyShared)>(p.op, p.device.index, stream, {grid, KeyConfig::kThreads}, p, arguments);
    }
    if (plan.num_query_tiles == 0) return;
    if constexpr (kDqSums) {
        const dim3 grid(static_cast<unsigned>(plan.num_rows / KeyConfig::kKeys), p.num_q_heads);
        launch<convert_query_sums_kernel<T, KeyConfig>>(p.op, p.device.index, stream,
                                                        {grid, KeyConfig::kThreads, true}, p, arguments);
    } else {
        using Config = BackwardConfig<kTiles.head_dim, kQueries.warps, kQueries.row_tiles, kQueries.columns,
                                      kQueries.stages>;
        const dim3 grid(plan.num_query_tiles, p.num_q_heads);
        launch<query_gradients_kernel<T, Config, kQueries.ctas_per_sm, kDropout, kBlocks, kRanges>,
               sizeof(QueryGradientsShared<T, Config, kDropout>)>(p.op, p.device.index, stream,
                                                                  {grid, Config::kThreads}, p, arguments);
    }
}

template <class T, int kRow>
void launch_sm80_backward(const AttentionBackwardParams& p, const Sm80BackwardPlan& plan,
                          const Sm80BackwardLaunch& arguments, cudaStream_t stream) {
    const int64_t num_rows = p.total_q * p.num_q_heads;
    if (num_rows > 0) {
        const LaunchShape shape{dim3(static_cast<unsigned>(ceil_divide(num_rows, kStatisticsRows))),
                                kStatisticsLanes * kStatisticsRows, true};
        launch<query_statistics_kernel<T>>(p.op, p.device.index, stream, shape, p, arguments);
    }
    if (p.dsinks) launch_sink_gradients(p, arguments.sinks, stream);
    if (plan.has_blocks) {
        launch_sm80_gradients<T, kRow, true, true, false>(p, plan, arguments, stream);
    } else if (plan.has_ranges) {
        launch_sm80_gradients<T, kRow, true, false, true>(p, plan, arguments, stream);
    } else if (plan.has_dropout) {
        (plan.sums_dq ? launch_sm80_gradients<T, kRow, true, false, false, true>
                      : launch_sm80_gradients<T, kRow, true, false, false>)(p, plan, arguments, stream);
    } else {
        (plan.sums_dq ? launch_sm80_gradients<T, kRow, false, false, false, true>
                      : launch_sm80_gradients<T, kRow, false, false, false>)(p, plan, arguments, stream);
    }
    if (!p.dalibi_slopes) return;
    launch_slope_gradients<false, kSm80BackwardTiles[kRow].queries.rows(), 1>(p, arguments.slopes, stream);
}

}  // namespace octavo::cuda
