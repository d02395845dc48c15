// RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) of the rows of x inside of sm90_flat. Every CTA has all
// columns of x in shared memory, its split of them at least. The warps that multiply take x times the weights
// of the norm, and add up the squares of x besides. At the end one more warp turns these into what the sums
// of products are multiplied by, while the others add up the products. Page: docs/kernels/linear.md.
#pragma once

#include "cuda/linear/flat_tile.cuh"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/warpgroup.h"
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

// Where the warp of the norm and the others meet, in shared memory.
template <class Config>
struct NormFactors {
    static constexpr int kXRows = Config::kXRows;
    float* of_warps;  // [kFlatWarps][kXRows]: sums of squares,
    float* landed;    // [splits][kXRows]: those of the CTAs of the cluster,
    float* factors;   // [kXRows]: and what the sums of products are multiplied by

    __device__ __forceinline__ explicit NormFactors(const Sm90LinearLaunch& p)
        : of_warps(reinterpret_cast<float*>(linear_stages() + p.norm_offset -
                                            norm_factor_bytes(p.splits, kXRows))),
          landed(of_warps + kFlatWarps * kXRows),
          factors(landed + p.splits * kXRows) {}

    // Like init_linear_barriers, which comes behind it.
    __device__ __forceinline__ static void init_barriers(int32_t splits) {
        LinearBarriers& barriers = linear_barriers();
        ptx::mbarrier_init(&barriers.factors, 1);
        ptx::mbarrier_init(&barriers.squares, 1);
        ptx::mbarrier_arrive_expect(&barriers.squares, (splits - 1) * kXRows * sizeof(float));
    }

    // The factors of rows `row` and `row + 1` of x; `row` is even.
    __device__ __forceinline__ float2 of(int row) const {
        ptx::mbarrier_wait(&linear_barriers().factors, 0);
        return *reinterpret_cast<const float2*>(factors + row);
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
    // same, so that a lane gets the columns that it has of x. The squares are the diagonal of x times its own
    // transpose, of which a lane has the same operands.
    __device__ __forceinline__ void normalise(int32_t stage) {
        const uint32_t row = weights_ + stage * Config::kPanels * 128;
        uint32_t weights[4];
        ptx::ldmatrix_x4(weights, row + (piece_ ^ (row / 128 % 8)) * 16);
#pragma unroll
        for (int j = 0; j < Base::kColumnTiles; ++j) {
#pragma unroll
            for (int unit = 0; unit < kUnits; unit += 2) {
                uint32_t* const x = Base::kTwoDepths ? &this->x_matrices_[j][0][unit]
                                                     : &this->x_matrices_[j - j % 2][0][j % 2 * 2];
                const uint32_t rows[4] = {x[0], 0, x[1], 0};
                ptx::mma_m16n8k16<T>(squares_[j], rows, x[0], x[1]);
                x[0] = multiply_pairs(x[0], weights[unit]);
                x[1] = multiply_pairs(x[1], weights[unit + 1]);
            }
        }
    }

    // Leaves this warp's sums of squares to the warp of the norm.
    __device__ __forceinline__ void share_squares(const Sm90LinearLaunch& p) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
        if (row / 2 == lane % 4) {  // the lane has the diagonal's element of this row
            float* const to = NormFactors<Config>(p).of_warps + warp * Config::kXRows + row;
#pragma unroll
            for (int j = 0; j < Base::kColumnTiles; ++j)
                to[8 * j] = row % 2 ? squares_[j][1] : squares_[j][0];
        }
        ptx::named_barrier_arrive(2, Config::kConsumers + 32);
    }

  private:
    static_assert(kUnits == 4 || kUnits == 2);
    static_assert(Config::kXRows <= kMostNormalisedXRows);
    uint32_t weights_, piece_;
    float squares_[Base::kColumnTiles][4] = {};
};

// The warp of the norm. Lane l finds the factor of row l.
template <class Config>
__device__ __forceinline__ void find_norm_factors(const Sm90LinearLaunch& p, int32_t rank) {
    constexpr int kXRows = Config::kXRows;
    const int lane = threadIdx.x % 32, row = lane % kXRows;
    const NormFactors<Config> norm(p);
    const float depth = static_cast<float>(p.depth);
    float* const own = norm.landed + rank * kXRows;
    if (p.splits > 1) ptx::cluster_wait();  // the other CTAs have initialised their barriers
    ptx::named_barrier_sync(2, Config::kConsumers + 32);
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kFlatWarps; ++warp) sum += norm.of_warps[warp * kXRows + row];
    if (p.splits > 1) {
        own[row] = sum;
        __syncwarp();
        const int4 four = reinterpret_cast<const int4*>(own)[lane % (kXRows / 4)];
        // A lane sends four sums to one CTA at a time.
        for (int32_t to = lane / (kXRows / 4); to < p.splits; to += 32 / (kXRows / 4)) {
            if (to == rank) continue;
            ptx::store_cluster_async(
                ptx::cluster_address(ptx::shared_address(own + lane % (kXRows / 4) * 4), to), four,
                ptx::cluster_address(ptx::shared_address(&linear_barriers().squares), to));
        }
        ptx::mbarrier_wait(&linear_barriers().squares, 0);
        sum = 0.0f;
        for (int32_t from = 0; from < p.splits; ++from) sum += norm.landed[from * kXRows + row];
    }
    norm.factors[row] = rsqrtf(sum / depth + p.norm_eps);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&linear_barriers().factors);
}

}  // namespace octavo::cuda
