// Launches the instances of one row of kSm90Tiles, or of kSm90CodeTiles, or those of some head dims that
// gather keys.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/sm90_attention/kernel.cuh"
#include "cuda/sm90_attention/plan.h"

namespace octavo::cuda {

template <class T, class Config>
void launch_sm90_kernel(const AttentionParams& params, const Sm90Plan& plan, const Sm90Launch& arguments,
                        cudaStream_t stream) {
    constexpr size_t kSharedBytes = sizeof(Sm90Shared<Config>);
    static_assert(kSharedBytes <= 227 * 1024);
    const LaunchShape shape{dim3(plan.num_ctas), Config::kThreads, true, Config::kCtas};
    constexpr auto kKernel = [] {
        if constexpr (Config::kBeside)
            return sm90_attention_beside_kernel<T, Config>;
        else
            return sm90_attention_kernel<T, Config>;
    }();
    launch<kKernel, kSharedBytes, Config::kBeside>(params.op, params.device.index, stream, shape, params,
                                                   arguments);
}

template <class T, int kHeadDim, int kValueDim, int kWarpgroups, int kCtas>
void launch_sm90_attention(const AttentionParams& params, const Sm90Plan& plan, const Sm90Launch& arguments,
                           cudaStream_t stream) {
    auto run = launch_sm90_kernel<T, Sm90Config<kHeadDim, kValueDim, kWarpgroups, kCtas, Sm90Feature::none>>;
    if constexpr (has_few_rows(kWarpgroups, kCtas)) {
        if (plan.feature == Sm90Feature::few_rows)
            run = launch_sm90_kernel<
                T, Sm90Config<kHeadDim, kValueDim, kWarpgroups, kCtas, Sm90Feature::few_rows>>;
    }
    if constexpr (has_splits(kHeadDim, kValueDim, kCtas)) {
        if (plan.feature == Sm90Feature::splits)
            run =
                launch_sm90_kernel<T,
                                   Sm90Config<kHeadDim, kValueDim, kWarpgroups, kCtas, Sm90Feature::splits>>;
    }
    if constexpr (is_first_row(kHeadDim, kValueDim, kWarpgroups, kCtas)) {
        if (plan.feature == Sm90Feature::tree)
            run =
                launch_sm90_kernel<T, Sm90Config<kHeadDim, kValueDim, kWarpgroups, kCtas, Sm90Feature::tree>>;
        if (plan.feature == Sm90Feature::ranges)
            run =
                launch_sm90_kernel<T,
                                   Sm90Config<kHeadDim, kValueDim, kWarpgroups, kCtas, Sm90Feature::ranges>>;
        if (plan.feature == Sm90Feature::split_ranges)
            run = launch_sm90_kernel<
                T, Sm90Config<kHeadDim, kValueDim, kWarpgroups, kCtas, Sm90Feature::split_ranges>>;
    }
    if constexpr (has_symmetric_alibi(kHeadDim, kValueDim, kCtas)) {
        if (plan.feature == Sm90Feature::symmetric_alibi)
            run = launch_sm90_kernel<
                T, Sm90Config<kHeadDim, kValueDim, kWarpgroups, kCtas, Sm90Feature::symmetric_alibi>>;
    }
    if constexpr (has_beside(kHeadDim, kWarpgroups, kCtas)) {
        if (plan.feature == Sm90Feature::beside)
            run =
                launch_sm90_kernel<T,
                                   Sm90Config<kHeadDim, kValueDim, kWarpgroups, kCtas, Sm90Feature::beside>>;
    }
    if constexpr (has_blocks(kHeadDim, kWarpgroups, kCtas)) {
        constexpr int kGroups = sm90_block_tiles(kHeadDim, 128).warpgroups;
        constexpr int kGroupsOfSmall = sm90_block_tiles(kHeadDim, 64).warpgroups;
        if (plan.feature == Sm90Feature::blocks)
            run = launch_sm90_kernel<T, Sm90Config<kHeadDim, kHeadDim, kGroups, 1, Sm90Feature::blocks>>;
        if (plan.feature == Sm90Feature::small_blocks)
            run = launch_sm90_kernel<
                T, Sm90Config<kHeadDim, kHeadDim, kGroupsOfSmall, 1, Sm90Feature::small_blocks>>;
    }
    if (plan.feature == Sm90Feature::sinks)
        run = launch_sm90_kernel<T, Sm90Config<kHeadDim, kValueDim, kWarpgroups, kCtas, Sm90Feature::sinks>>;
    if (plan.feature == Sm90Feature::softcap)
        run =
            launch_sm90_kernel<T, Sm90Config<kHeadDim, kValueDim, kWarpgroups, kCtas, Sm90Feature::softcap>>;
    if (plan.feature == Sm90Feature::alibi)
        run = launch_sm90_kernel<T, Sm90Config<kHeadDim, kValueDim, kWarpgroups, kCtas, Sm90Feature::alibi>>;
    if (plan.feature == Sm90Feature::dropout)
        run =
            launch_sm90_kernel<T, Sm90Config<kHeadDim, kValueDim, kWarpgroups, kCtas, Sm90Feature::dropout>>;
    run(params, plan, arguments, stream);
}

// Launches the instances of one row of kSm90Tiles that gather keys. Calls without splits and tree masks take
// the kernel for few rows, if there is one.
template <class T, int kHeadDim, int kValueDim, int kWarpgroups>
void launch_sm90_attention_gathered(const AttentionParams& params, const Sm90Plan& plan,
                                    const Sm90Launch& arguments, cudaStream_t stream) {
    constexpr Sm90Cache kCache = Sm90Cache::gathered;
    constexpr Sm90Feature kOther = has_few_rows(kWarpgroups, 1) ? Sm90Feature::few_rows : Sm90Feature::sinks;
    auto run = launch_sm90_kernel<T, Sm90Config<kHeadDim, kValueDim, kWarpgroups, 1, kOther, kCache>>;
    if constexpr (has_splits(kHeadDim, kValueDim, 1)) {
        if (plan.feature == Sm90Feature::splits)
            run = launch_sm90_kernel<
                T, Sm90Config<kHeadDim, kValueDim, kWarpgroups, 1, Sm90Feature::splits, kCache>>;
    }
    if constexpr (is_first_row(kHeadDim, kValueDim, kWarpgroups, 1)) {
        if (plan.feature == Sm90Feature::tree)
            run = launch_sm90_kernel<
                T, Sm90Config<kHeadDim, kValueDim, kWarpgroups, 1, Sm90Feature::tree, kCache>>;
    }
    run(params, plan, arguments, stream);
}

// Launches the instances of one row of kSm90CodeTiles. Calls without a feature take the kernel for few rows.
template <Sm90Cache kCache, int kHeadDim>
void launch_sm90_attention_codes(const AttentionParams& params, const Sm90Plan& plan,
                                 const Sm90Launch& arguments, cudaStream_t stream) {
    constexpr int kWarpgroups = 2;
    auto run =
        launch_sm90_kernel<AnyFloat16,
                           Sm90Config<kHeadDim, kHeadDim, kWarpgroups, 1, Sm90Feature::few_rows, kCache>>;
    if (plan.feature == Sm90Feature::splits)
        run = launch_sm90_kernel<AnyFloat16,
                                 Sm90Config<kHeadDim, kHeadDim, kWarpgroups, 1, Sm90Feature::splits, kCache>>;
    if (plan.feature == Sm90Feature::tree)
        run = launch_sm90_kernel<AnyFloat16,
                                 Sm90Config<kHeadDim, kHeadDim, kWarpgroups, 1, Sm90Feature::tree, kCache>>;
    if (plan.feature == Sm90Feature::alibi)
        run = launch_sm90_kernel<AnyFloat16,
                                 Sm90Config<kHeadDim, kHeadDim, kWarpgroups, 1, Sm90Feature::alibi, kCache>>;
    if (plan.tiles().warpgroups == 1) {
        run =
            launch_sm90_kernel<AnyFloat16, Sm90Config<kHeadDim, kHeadDim, 1, 1, Sm90Feature::sinks, kCache>>;
        if (plan.feature == Sm90Feature::splits)
            run = launch_sm90_kernel<AnyFloat16,
                                     Sm90Config<kHeadDim, kHeadDim, 1, 1, Sm90Feature::splits, kCache>>;
    }
    run(params, plan, arguments, stream);
}

}  // namespace octavo::cuda
