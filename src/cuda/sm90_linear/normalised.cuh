// RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) of the rows of x inside of sm90_flat. Every CTA has all
// columns of x in shared memory, its split of them at least. So its warps multiply what they load by the
// weights of the norm, and add up the squares of x besides; the mean of these divides the sums of products at
// the end. Page: docs/kernels/linear.md.
#pragma once

#include "cuda/linear/flat_tile.cuh"
#include "cuda/ptx/cluster.h"
#include "cuda/sm90_linear/operand_copy.cuh"
#include "cuda/types.h"

namespace octavo::cuda {

__device__ __forceinline__ uint32_t multiply_pairs(uint32_t x, uint32_t y) {
    __nv_bfloat162 a, b;
    memcpy(&a, &x, sizeof(x));
    memcpy(&b, &y, sizeof(y));
    const __nv_bfloat162 product = __hmul2(a, b);
    memcpy(&x, &product, sizeof(x));
    return x;
}

// The squares of the rows of x, as they lie in shared memory: the sums of each warp, where the weights were,
// and those that the other CTAs of the cluster send, behind the sums of products.
template <class Config>
struct SquareSums {
    static constexpr int kXRows = Config::kXRows;
    float* of_warps;  // [kFlatWarps][kXRows]
    float4* landed;   // [splits][kXRows / 4]

    // This CTA's squares of four rows of x, from 4 * `piece` on.
    __device__ __forceinline__ float4 own(int piece) const {
        float4 sum{};
#pragma unroll
        for (int w = 0; w < kFlatWarps; ++w)
            add(sum, reinterpret_cast<const float4*>(of_warps + w * kXRows)[piece]);
        return sum;
    }

    // Sends this CTA's squares to those CTAs of the cluster that own tiles. One warp calls this.
    __device__ __forceinline__ void send(int32_t splits, int32_t rank) const {
        const int lane = threadIdx.x % 32;
        if (lane >= kXRows / 4) return;
        const float4 sum = own(lane);
        const int32_t owners = min(splits, Config::kTiles);
        for (int32_t to = 0; to < owners; ++to) {
            if (to == rank) continue;
            ptx::store_cluster_async(
                ptx::cluster_address(ptx::shared_address(landed + rank * (kXRows / 4) + lane), to),
                {__float_as_int(sum.x), __float_as_int(sum.y), __float_as_int(sum.z), __float_as_int(sum.w)},
                ptx::cluster_address(ptx::shared_address(&linear_barriers().landed), to));
        }
    }

    // What divides the sums of rows `row` and `row + 1` of x; `row` is even.
    __device__ __forceinline__ float2 factors(const Sm90LinearLaunch& p, int32_t rank, int row) const {
        float2 sum{};
        for (int32_t from = 0; from < p.splits; ++from) {
            const float4 part = from == rank ? own(row / 4) : landed[from * (kXRows / 4) + row / 4];
            sum.x += row % 4 == 0 ? part.x : part.z;
            sum.y += row % 4 == 0 ? part.y : part.w;
        }
        const auto depth = static_cast<float>(p.depth);
        return {rsqrtf(sum.x / depth + p.norm_eps), rsqrtf(sum.y / depth + p.norm_eps)};
    }
};

// The products of a warp with x times the weights of the norm, and the squares of x.
template <class T, class Config>
class NormalisedProducts : public FlatProducts<T, Config> {
    using Base = FlatProducts<T, Config>;
    static constexpr int kUnits = Config::kPanels;  // units of eight columns that a warp has of a stage

  public:
    // `weights`: the address of the weights of the first stage in the shared window.
    __device__ __forceinline__ NormalisedProducts(int warp, int lane, bool is_gated, uint32_t weights)
        : Base(warp, lane, is_gated),
          weights_(weights + warp * kUnits / 8 * 128),
          piece_(warp * kUnits % 8 + lane / 8 % kUnits) {}

    // Takes the stage that was loaded last to the weights' units, which are loaded as rows that are all the
    // same, so that a lane gets the columns that it has of x.
    __device__ __forceinline__ void normalise(int32_t stage) {
        const uint32_t row = weights_ + stage * Config::kPanels * 128;
        uint32_t weights[4];
        ptx::ldmatrix_x4(weights, row + (piece_ ^ (row / 128 % 8)) * 16);
#pragma unroll
        for (int j = 0; j < Base::kColumnTiles; ++j) {
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit) {
                uint32_t& x = Base::kTwoDepths ? this->x_matrices_[j][0][unit]
                                               : this->x_matrices_[j - j % 2][0][j % 2 * 2 + unit];
                const float2 numbers = unpack<T>(x);
                squares_[j] += numbers.x * numbers.x;
                squares_[j] += numbers.y * numbers.y;
                x = multiply_pairs(x, weights[unit]);
            }
        }
    }

    // Writes this warp's squares for the others.
    __device__ __forceinline__ void share_squares(const SquareSums<Config>& to) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < Base::kColumnTiles; ++j) {
            float sum = squares_[j];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (lane % 4 == 0) to.of_warps[warp * Config::kXRows + j * 8 + lane / 4] = sum;
        }
    }

  private:
    static_assert(kUnits == 4 || kUnits == 2);
    static_assert(Config::kXRows <= kMostNormalisedXRows);
    uint32_t weights_, piece_;
    float squares_[Base::kColumnTiles] = {};
};

}  // namespace octavo::cuda
