// sm90_flat: a few rows of x times weights, by mma.sync with the weights on its side of 16 rows and x on its
// side of 8, so that x is padded only to 8 rows (the flat GEMM of FlashDecoding++). Page:
// docs/kernels/linear.md.
//
// grid: tiles x splits; the CTAs of a tile are a cluster. A CTA owns a tile of rows of w and its split of K,
// which one thread copies through the ring. Each of eight warps takes an eighth of the columns of every
// stage; their sums, and those of the cluster, are added in the end, in an order that follows from K, the
// tile and the splits alone.
#pragma once

#include "cuda/linear/flat_tile.cuh"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90_linear/normalised.cuh"
#include "cuda/sm90_linear/operand_copy.cuh"

#include <type_traits>

namespace octavo::cuda {

template <int kWRows, int kXRows, int kPanels, bool kNormalises_>
struct FlatConfig : FlatTileConfig<kWRows, kXRows, kPanels> {
    static constexpr bool kNormalises = kNormalises_;
    // One warp copies, and one finds the factors of the norm.
    static constexpr int kThreads = 32 * kFlatWarps + (kNormalises ? 64 : 32);
    static constexpr int kMinCtas = flat_fits_twice(kWRows, kXRows) ? 2 : 1;
};

// Adds up the sums of all warps, and of the CTAs of the cluster. The CTAs divide the tiles: every splits-th
// belongs to this CTA. As `splits` divides the number of warps, all tiles of a warp have the same owner: the
// warp sends either all of its tiles or none, so that no two warps wait for each other.
template <class T, class Config, class Products>
__device__ __forceinline__ void finish_flat_tiles(const Sm90LinearLaunch& p, int32_t tile, int32_t rank,
                                                  const Products& products) {
    constexpr int kTiles = Config::kTiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto* const of_warps = reinterpret_cast<float4*>(linear_stages());
    auto* const landed = reinterpret_cast<float4*>(linear_stages() + p.stages * Config::kStage.bytes());
    const int32_t shares = (kTiles + p.splits - 1) / p.splits;  // the most tiles that a CTA owns
    auto slot = [&](int32_t from, int32_t to, int i) {
        return ((from < to ? from : from - 1) * shares + i / p.splits) * 32 + lane;
    };

    if constexpr (Config::kNormalises) products.share_squares(p);
    ptx::named_barrier_sync(1, Config::kConsumers);  // all warps have read the stages
    share_sums<T, Config>(of_warps, products);
    ptx::named_barrier_sync(1, Config::kConsumers);
    if (p.splits > 1) ptx::cluster_wait();  // the other CTAs have initialised their barriers
    const int32_t column = p.first_column(tile / p.x_tiles);
    const int32_t end = min(p.first_column(tile / p.x_tiles + 1), p.output.width);
    for (int i = warp; i < kTiles; i += kFlatWarps) {
        float4 sum = sum_of_warps<Config>(of_warps, i);
        const int32_t owner = i % p.splits;
        if (owner != rank) {
            ptx::store_cluster_async(
                ptx::cluster_address(ptx::shared_address(landed + slot(rank, owner, i)), owner),
                {__float_as_int(sum.x), __float_as_int(sum.y), __float_as_int(sum.z), __float_as_int(sum.w)},
                ptx::cluster_address(ptx::shared_address(&linear_barriers().landed), owner));
            continue;
        }
        if (p.splits > 1) {
            ptx::mbarrier_wait(&linear_barriers().landed, 0);
            float4 total{};
            for (int32_t from = 0; from < p.splits; ++from)
                add(total, from == rank ? sum : landed[slot(from, rank, i)]);
            sum = total;
        }
        if constexpr (Config::kNormalises) {
            const float2 factors = NormFactors<Config>(p).of(i % Config::kColumnTiles * 8 + lane % 4 * 2);
            sum = {sum.x * factors.x, sum.y * factors.y, sum.z * factors.x, sum.w * factors.y};
        }
        write_flat_tile<T, Config>(p.output, tile % p.x_tiles * Config::kXRows, column, end, i, sum);
    }
}

template <class T, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtas)
    sm90_flat_kernel(const __grid_constant__ Sm90LinearLaunch p) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const auto rank = static_cast<int32_t>(p.splits > 1 ? ptx::cluster_rank() : 0);
    const int32_t tile = static_cast<int32_t>(blockIdx.x) / p.splits;
    const StepRange range(p, rank);
    if (threadIdx.x == 0) {
        const int32_t own = max((Config::kTiles - rank + p.splits - 1) / p.splits, 0);
        const int32_t landed_bytes = own * (p.splits - 1) * 32 * sizeof(float4);
        if constexpr (Config::kNormalises) NormFactors<Config>::init_barriers(p.splits);
        init_linear_barriers(p, kFlatWarps, landed_bytes);
    }
    __syncthreads();
    if (p.splits > 1) ptx::cluster_arrive_relaxed();
    if (warp == kFlatWarps) {
        constexpr int kNormPanels = Config::kNormalises ? Config::kPanels : 0;
        if (ptx::elect_one())
            OperandCopy<Config::kWRows, Config::kXRows, kNormPanels>(p, range, tile, p.num_tiles).run();
        __syncwarp();
        if (p.splits > 1) ptx::cluster_wait();
        return;
    }
    if constexpr (Config::kNormalises) {
        if (warp > kFlatWarps) return find_norm_factors<Config>(p, rank);
    }
    const int lane = threadIdx.x % 32;
    auto products = [&] {
        if constexpr (Config::kNormalises) {
            return NormalisedProducts<T, Config>(warp, lane, p.output.is_gated(),
                                                 ptx::shared_address(linear_stages() + p.norm_offset));
        } else {
            return FlatProducts<T, Config>(warp, lane, p.output.is_gated());
        }
    }();
    RingPosition at;
    for (int32_t step = range.begin; step < range.end; ++step) {
        ptx::mbarrier_wait(&linear_barriers().full[at.stage], at.parity);
        products.load(ptx::shared_address(linear_stages() + at.stage * Config::kStage.bytes()));
        if constexpr (Config::kNormalises) products.normalise(at.stage);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&linear_barriers().empty[at.stage]);
        products.multiply();
        at.advance(p.stages);
    }
    ptx::wait_for_previous_grid();  // `residual` may be its result
    finish_flat_tiles<T, Config>(p, tile, rank, products);
}

}  // namespace octavo::cuda
