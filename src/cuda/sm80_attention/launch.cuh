// Launches the instances of one row of kSm80Tiles.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/sm80_attention/combine_splits.cuh"
#include "cuda/sm80_attention/kernel.cuh"
#include "cuda/sm80_attention/plan.h"

namespace octavo::cuda {

template <class T, int kHeadDim, int kStages, Sm80Feature kFeature>
void launch_sm80_kernel(const AttentionParams& params, const Sm80Plan& plan, const Sm80Launch& arguments,
                        cudaStream_t stream) {
    using Config = Sm80Config<kHeadDim, kStages>;
    constexpr size_t kSharedBytes = sizeof(Sm80Shared<T, Config, has_ranges(kFeature)>);
    static_assert(kSharedBytes <= sm80_shared_bytes(kStages));
    const dim3 grid(plan.num_row_tiles, plan.num_kv_heads, plan.num_splits);
    launch<sm80_attention_kernel<T, Config, kFeature>, kSharedBytes>(
        params.op, params.device.index, stream, {grid, Config::kThreads}, params, arguments);
}

template <class T, int kHeadDim, int kStages>
void launch_sm80_attention(const AttentionParams& params, const Sm80Plan& plan, const Sm80Launch& arguments,
                           cudaStream_t stream) {
    auto run = launch_sm80_kernel<T, kHeadDim, kStages, Sm80Feature::none>;
    if (plan.feature == Sm80Feature::dropout)
        run = launch_sm80_kernel<T, kHeadDim, kStages, Sm80Feature::dropout>;
    if constexpr (kHeadDim <= kMaxCudaCodeHeadDim) {
        if (plan.feature == Sm80Feature::codes)
            run = launch_sm80_kernel<T, kHeadDim, kStages, Sm80Feature::codes>;
        if (plan.feature == Sm80Feature::code_ranges)
            run = launch_sm80_kernel<T, kHeadDim, kStages, Sm80Feature::code_ranges>;
    }
    if (plan.feature == Sm80Feature::blocks)
        run = launch_sm80_kernel<T, kHeadDim, kStages, Sm80Feature::blocks>;
    if (plan.feature == Sm80Feature::ranges)
        run = launch_sm80_kernel<T, kHeadDim, kStages, Sm80Feature::ranges>;
    run(params, plan, arguments, stream);
    if (plan.num_splits == 1) return;
    const int64_t rows = params.total_q * params.num_q_heads;  // one warp each
    const dim3 grid(static_cast<unsigned>(ceil_divide(32 * rows, kCombineThreads)));
    launch<combine_splits_kernel<T>>(params.op, params.device.index, stream, {grid, kCombineThreads}, params,
                                     arguments);
}

}  // namespace octavo::cuda
