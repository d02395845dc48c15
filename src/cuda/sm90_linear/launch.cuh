// Launches the instances for one number of rows of w.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/sm90_linear/flat.cuh"
#include "cuda/sm90_linear/plan.h"
#include "cuda/sm90_linear/wide.cuh"

#include <type_traits>

namespace octavo::cuda {

constexpr size_t kLinearSharedBytes = 227 * 1024;

inline LaunchShape shape_of(const Sm90LinearPlan& plan, int32_t threads) {
    LaunchShape shape{dim3(static_cast<unsigned>(plan.num_ctas)), threads, true};
    shape.cluster = plan.tile.splits;
    shape.shared_bytes = plan.shared_bytes;
    return shape;
}

template <class T, int kRow>
void launch_sm90_flat(int32_t device, const Sm90LinearPlan& plan, const Sm90LinearLaunch& arguments,
                      cudaStream_t stream) {
    auto launch_if = [&](auto x_rows) {
        constexpr int32_t kXRows = decltype(x_rows)::value;
        if constexpr (kXRows <= kFlatTiles[kRow].max_x_rows) {
            auto launch_with = [&](auto normalises) {
                using Config = FlatConfig<kFlatTiles[kRow].w_rows, kXRows, kFlatTiles[kRow].panels,
                                          decltype(normalises)::value>;
                launch<sm90_flat_kernel<T, Config>, kLinearSharedBytes>(
                    "linear", device, stream, shape_of(plan, Config::kThreads), arguments);
            };
            if (plan.tile.x_rows != kXRows) return;
            if constexpr (std::is_same_v<T, bfloat16> && kXRows <= kMostNormalisedXRows) {
                if (plan.normalises) return launch_with(std::true_type{});
            }
            launch_with(std::false_type{});
        }
    };
    launch_if(std::integral_constant<int32_t, kFlatXRows[0]>{});
    launch_if(std::integral_constant<int32_t, kFlatXRows[1]>{});
    launch_if(std::integral_constant<int32_t, kFlatXRows[2]>{});
    launch_if(std::integral_constant<int32_t, kFlatXRows[3]>{});
}

template <class T, int kRow>
void launch_sm90_wide(int32_t device, const Sm90LinearPlan& plan, const Sm90LinearLaunch& arguments,
                      cudaStream_t stream) {
    auto launch_if = [&](auto x_rows) {
        constexpr int32_t kXRows = decltype(x_rows)::value;
        if constexpr (kXRows <= kWideTiles[kRow].max_x_rows) {
            using Config = WideConfig<kWideTiles[kRow].w_rows, kXRows>;
            if (plan.tile.x_rows == kXRows) {
                launch<sm90_wide_kernel<T, Config>, kLinearSharedBytes>(
                    "linear", device, stream, shape_of(plan, Config::kThreads), arguments);
            }
        }
    };
    launch_if(std::integral_constant<int32_t, kWideXRows[0]>{});
    launch_if(std::integral_constant<int32_t, kWideXRows[1]>{});
    launch_if(std::integral_constant<int32_t, kWideXRows[2]>{});
    launch_if(std::integral_constant<int32_t, kWideXRows[3]>{});
}

}  // namespace octavo::cuda
