#include "cuda/linear/run.h"
#include "cuda/sm90_linear/parameters.h"
#include "cuda/sm90_linear/plan.h"
#include "cuda/tma/tensor_map.h"
#include "cuda/types.h"

#include <array>
#include <iterator>
#include <utility>

namespace octavo::cuda {

// Each row of kFlatTiles or kWideTiles has one for each type, compiled from instance.cu.in.
template <class T, int kRow>
void launch_sm90_flat(int32_t device, const Sm90LinearPlan&, const Sm90LinearLaunch&, cudaStream_t);
template <class T, int kRow>
void launch_sm90_wide(int32_t device, const Sm90LinearPlan&, const Sm90LinearLaunch&, cudaStream_t);

namespace {

using Launch = void (*)(int32_t, const Sm90LinearPlan&, const Sm90LinearLaunch&, cudaStream_t);

template <class T, size_t... kRows>
constexpr std::array<Launch, sizeof...(kRows)> flat_launches(std::index_sequence<kRows...>) {
    return {launch_sm90_flat<T, kRows>...};
}
template <class T, size_t... kRows>
constexpr std::array<Launch, sizeof...(kRows)> wide_launches(std::index_sequence<kRows...>) {
    return {launch_sm90_wide<T, kRows>...};
}
using FlatRows = std::make_index_sequence<OCTAVO_HAS_SM90_KERNELS ? std::size(kFlatTiles) : 0>;
using WideRows = std::make_index_sequence<OCTAVO_HAS_SM90_KERNELS ? std::size(kWideTiles) : 0>;

template <class T>
Launch launch_of(const Sm90LinearPlan& plan) {
    static constexpr auto kFlat = flat_launches<T>(FlatRows{});
    static constexpr auto kWide = wide_launches<T>(WideRows{});
    size_t row = 0;
    if (plan.tile.kernel == Sm90LinearKernel::flat) {
        while (kFlatTiles[row].w_rows != plan.tile.w_rows) ++row;
        return kFlat.at(row);
    }
    while (kWideTiles[row].w_rows != plan.tile.w_rows) ++row;
    return kWide.at(row);
}

// The tensor map of rows of w or x, in `halves` runs, as the kernels copy them (parameters.h).
CUtensorMap map_of_rows(const void* base, int64_t rows, int64_t halves, int64_t stride, int64_t depth,
                        int32_t tile_rows, int32_t panels, bool copies_stages) {
    const int32_t box_rows = static_cast<int32_t>(tile_rows / halves);
    if (!copies_stages)
        return make_tensor_map(base, {{depth, rows, halves, 1, 1},
                                      {stride, rows * stride, kPanelColumns, kPanelColumns},
                                      {kPanelColumns, box_rows, static_cast<int32_t>(halves), 1, 1}});
    return make_tensor_map(base, {{kPanelColumns, rows, halves, depth / kPanelColumns, 1},
                                  {stride, rows * stride, kPanelColumns, kPanelColumns},
                                  {kPanelColumns, box_rows, static_cast<int32_t>(halves), panels, 1}});
}

}  // namespace

void run(const LinearParams& p, const Sm90LinearPlan& plan, cudaStream_t stream) {
    const LinearStage stage = plan.stage();
    const int64_t halves = p.is_gated() ? 2 : 1;
    Sm90LinearLaunch arguments{};
    arguments.copies_stages = p.depth % kPanelColumns == 0;
    if (p.depth > 0) {
        arguments.w = map_of_rows(p.w, p.width, halves, p.w_stride, p.depth, plan.tile.w_rows, stage.panels,
                                  arguments.copies_stages);
        arguments.x = map_of_rows(p.x, p.num_rows, 1, p.x_rows.strides[0], p.depth, plan.tile.x_rows,
                                  stage.panels, arguments.copies_stages);
    }
    arguments.static_weight = p.static_weight;
    arguments.steps = plan.steps;
    arguments.splits = plan.tile.splits;
    arguments.x_tiles = plan.x_tiles;
    arguments.num_tiles = plan.w_tiles * plan.x_tiles;
    arguments.w_tiles = plan.w_tiles;
    arguments.column_groups = static_cast<int32_t>(ceil_divide(p.width, 8));
    arguments.stages = plan.stages;
    arguments.stage_bytes = stage.bytes();
    arguments.panels = stage.panels;
    arguments.output = output_of(p);
    if (plan.normalises) {
        constexpr int64_t kAnyStride =
            kPanelColumns;  // there is one row; K might not be a stride of 16 bytes
        arguments.norm_weight =
            map_of_rows(p.norm_weight, 1, 1, kAnyStride, p.depth, 1, stage.panels, arguments.copies_stages);
        arguments.norm_offset = plan.norm_offset;
        arguments.norm_eps = p.norm_eps;
        arguments.depth = static_cast<int32_t>(p.depth);
    }
    (plan.dtype == DType::float16 ? launch_of<float16>(plan) : launch_of<bfloat16>(plan))(
        p.device.index, plan, arguments, stream);
}

}  // namespace octavo::cuda
