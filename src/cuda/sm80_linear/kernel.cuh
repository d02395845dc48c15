// sm80_linear: rows of x times weights on every GPU, for rows of any alignment. Page: docs/kernels/linear.md.
//
// grid: tiles of rows of w x tiles of rows of x, the latter innermost. A CTA owns one tile of the result.
// Eight warps divide K, each taking every eighth panel of 64 columns: the warp copies its panels, two ahead,
// to shared memory of its own and multiplies them (flat_tile.cuh), so that warps wait for one another only to
// add up their sums in the end.
#pragma once

#include "cuda/linear/flat_tile.cuh"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/sm80_linear/parameters.h"
#include "cuda/sm80_linear/tiles.h"

namespace octavo::cuda {

// A stage has one panel for each warp, which copies and multiplies its own.
template <int kXRows>
using Sm80LinearConfig = FlatTileConfig<kSm80LinearWRows, kXRows, kFlatWarps>;

template <class Config>
constexpr size_t kSm80LinearSharedBytes = kSm80LinearStages * Config::kStage.bytes();

// Copies this lane's part of a panel of rows. Rows for which source() has no address, and columns from
// `depth` on, become zeros. `base`: the array's first element, to which copies of nothing point.
template <class T, bool kInPieces, int kRows, class Source>
__device__ __forceinline__ void copy_panel(char* panel, const void* base, int64_t first_column, int64_t depth,
                                           const Source& source) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRows * 8 / 32; ++i) {
        const int row = i * 4 + lane / 8, piece = lane % 8;
        const int64_t column = first_column + piece * 8;
        const T* const from = source(row);
        const auto count = static_cast<int>(from && column < depth ? min(depth - column, int64_t{8}) : 0);
        char* const to = panel + row * 128 + ((piece ^ (row & 7)) << 4);
        if constexpr (kInPieces) {
            ptx::cp_async_16_part(ptx::shared_address(to), count > 0 ? from + column : base, count * 2);
        } else {
            T numbers[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) numbers[c] = c < count ? from[column + c] : from_float<T>(0.0f);
            memcpy(to, numbers, sizeof(numbers));
        }
    }
}

template <class T, class Config, bool kInPieces>
__global__ void __launch_bounds__(Config::kConsumers)
    sm80_linear_kernel(const __grid_constant__ Sm80LinearLaunch p) {
    extern __shared__ __align__(1024) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t column = static_cast<int32_t>(blockIdx.x / p.x_tiles) * p.out_columns;
    const int32_t x_row = static_cast<int32_t>(blockIdx.x % p.x_tiles) * Config::kXRows;
    const auto steps =
        static_cast<int32_t>((p.depth + kPanelColumns * kFlatWarps - 1) / (kPanelColumns * kFlatWarps));

    auto w_source = [&](int row) {  // with a gate: rows of the gate, then the rows that they gate
        const bool is_second = p.output.is_gated() && row >= Config::kWRows / 2;
        const int32_t of_out = column + row - (is_second ? Config::kWRows / 2 : 0);
        return of_out < p.output.width ? static_cast<const T*>(p.w) +
                                             (of_out + (is_second ? int64_t{p.output.width} : 0)) * p.w_stride
                                       : nullptr;
    };
    auto x_source = [&](int row) {
        return x_row + row < p.output.num_rows ? static_cast<const T*>(p.x) + (x_row + row) * p.x_stride
                                               : nullptr;
    };
    auto stage = [&](int32_t step) { return shared + step % kSm80LinearStages * Config::kStage.bytes(); };
    auto first_column = [&](int32_t step) { return (int64_t{step} * kFlatWarps + warp) * kPanelColumns; };
    auto copy_w = [&](int32_t step) {
        if (step >= steps) return;
        copy_panel<T, kInPieces, Config::kWRows>(
            stage(step) + Config::kStage.x_bytes() + warp * Config::kWRows * 128, p.w, first_column(step),
            p.depth, w_source);
    };
    auto copy_x = [&](int32_t step) {
        if (step >= steps) return;
        copy_panel<T, kInPieces, Config::kXRows>(stage(step) + warp * Config::kXRows * 128, p.x,
                                                 first_column(step), p.depth, x_source);
    };

    if (p.static_weight) copy_w(0);
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    if (!p.static_weight) copy_w(0);
    copy_x(0);
    ptx::cp_async_commit();
    FlatProducts<T, Config> products(warp, lane, p.output.is_gated());
    for (int32_t step = 0; step < steps; ++step) {
        copy_w(step + 1);
        copy_x(step + 1);
        ptx::cp_async_commit();
        ptx::cp_async_wait<1>();
        __syncwarp();
        products.load(ptx::shared_address(stage(step)));
        __syncwarp();
        products.multiply();
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    auto* const of_warps = reinterpret_cast<float4*>(shared);
    share_sums(of_warps, products);
    __syncthreads();
    for (int i = warp; i < Config::kTiles; i += kFlatWarps)
        write_flat_tile<T, Config>(p.output, x_row, column, min(column + p.out_columns, p.output.width), i,
                                   sum_of_warps<Config>(of_warps, i));
}

}  // namespace octavo::cuda
