// How eight warps multiply a stage by mma.sync, with weights on its side of 16 rows and x on its side of 8: a
// few rows of x times weights (the flat GEMM of FlashDecoding++). sm90_flat and sm80_linear share it; they
// differ in how stages arrive.
#pragma once

#include "cuda/linear/output.cuh"
#include "cuda/linear/stage.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"

namespace octavo::cuda {

template <int kWRows_, int kXRows_, int kPanels_>
struct FlatTileConfig {
    static constexpr int kWRows = kWRows_, kXRows = kXRows_, kPanels = kPanels_;
    static constexpr int kConsumers = 32 * kFlatWarps;
    static constexpr int kRowTiles = kWRows / 16, kColumnTiles = kXRows / 8;
    static constexpr int kTiles = kRowTiles * kColumnTiles;  // tiles of 16 rows of w and 8 of x
    static constexpr LinearStage kStage{kWRows, kXRows, kPanels};
};

// One warp's products, over its columns of each stage.
template <class T, class Config>
class FlatProducts {
  protected:
    static constexpr int kRowTiles = Config::kRowTiles, kColumnTiles = Config::kColumnTiles;
    static constexpr int kDepths = Config::kPanels / 2;  // products of 16 columns in a stage
    // Four matrices of x are loaded at once: two depths of eight rows, or one depth of sixteen.
    static constexpr bool kTwoDepths = kDepths >= 2;
    static constexpr int kXLoads = kTwoDepths ? kDepths / 2 : 1;

  public:
    // With a gate, the first half of the tile's rows are rows of the gate. A product takes eight of them and
    // the eight rows that they gate, so that a thread gets both sums.
    __device__ __forceinline__ FlatProducts(int warp, int lane, bool is_gated) {
        const int columns = warp * Config::kPanels;  // in units of eight columns
        const int panel = columns / 8, piece = columns % 8, row = lane % 8;
        const int w_row = row + lane / 8 % 2 * (is_gated ? Config::kWRows / 2 : 8);
        w_step_ = (is_gated ? 8 : 16) * 128;
        w_ = Config::kStage.x_bytes() + (panel * Config::kWRows + w_row) * 128;
#pragma unroll
        for (int i = 0; i < kDepths; ++i) w_piece_[i] = ((piece + 2 * i + lane / 16) ^ row) * 16;
        const int x_row = row + (!kTwoDepths && Config::kXRows > 8 ? lane / 16 * 8 : 0);
        x_ = (panel * Config::kXRows + x_row) * 128;
#pragma unroll
        for (int i = 0; i < kXLoads; ++i)
            x_piece_[i] = ((piece + 4 * i + lane / 8 % (kTwoDepths ? 4 : 2)) ^ row) * 16;
    }

    // `stage`: the stage's address in the shared window.
    __device__ __forceinline__ void load(uint32_t stage) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int i = 0; i < kDepths; ++i)
                ptx::ldmatrix_x4(w_matrices_[r][i], stage + w_ + r * w_step_ + w_piece_[i]);
#pragma unroll
        for (int j = 0; j < kColumnTiles; j += kTwoDepths ? 1 : 2)
#pragma unroll
            for (int i = 0; i < kXLoads; ++i)
                ptx::ldmatrix_x4(x_matrices_[j][i], stage + x_ + j * 1024 + x_piece_[i]);
    }

    __device__ __forceinline__ void multiply() {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
                for (int i = 0; i < kDepths; ++i) {
                    const int at = kTwoDepths ? i % 2 * 2 : j % 2 * 2;
                    const uint32_t (&x)[4] = x_matrices_[kTwoDepths ? j : j - j % 2][i / 2];
                    ptx::mma_m16n8k16<T>(sums_[r][j], w_matrices_[r][i], x[at], x[at + 1]);
                }
    }

    __device__ __forceinline__ float4 sums(int tile) const {
        const float (&d)[4] = sums_[tile / kColumnTiles][tile % kColumnTiles];
        return {d[0], d[1], d[2], d[3]};
    }

  protected:
    // The matrices of x, of eight rows and eight columns each: `i % 2` of depth i / 2 where two depths are
    // loaded at once; otherwise `i % 2` of eight rows, then of the next eight.
    uint32_t x_matrices_[kColumnTiles][kXLoads][4];

  private:
    uint32_t w_, w_step_, w_piece_[kDepths], x_, x_piece_[kXLoads];
    uint32_t w_matrices_[kRowTiles][kDepths][4];
    float sums_[kRowTiles][kColumnTiles][4] = {};
};

// Writes each warp's sums for the others: [kFlatWarps][kTiles][32] in shared memory.
template <class T, class Config>
__device__ __forceinline__ void share_sums(float4* of_warps, const FlatProducts<T, Config>& products) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Config::kTiles; ++i)
        of_warps[(warp * Config::kTiles + i) * 32 + lane] = products.sums(i);
}

__device__ __forceinline__ void add(float4& sum, const float4& x) {
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}

// This lane's sums of tile `i` over all warps.
template <class Config>
__device__ __forceinline__ float4 sum_of_warps(const float4* of_warps, int i) {
    float4 sum{};
#pragma unroll
    for (int w = 0; w < kFlatWarps; ++w) add(sum, of_warps[(w * Config::kTiles + i) * 32 + threadIdx.x % 32]);
    return sum;
}

// Exchanges sums between two neighbouring lanes, which have two rows of w at two rows of x. Afterwards this
// lane has both rows of w at one row of x: the first one if its own row of w is even.
__device__ __forceinline__ float2 pair_of_columns(float first, float second, bool is_odd) {
    const float other = __shfl_xor_sync(~0u, is_odd ? first : second, 4);
    return is_odd ? float2{other, second} : float2{first, other};
}

// Writes tile `i` of the sums to the result. `x_row`, `column`: where the CTA's tile begins in the result;
// `end`: the first column behind it.
template <class T, class Config>
__device__ __forceinline__ void write_flat_tile(const LinearOutput& p, int32_t x_row, int32_t column,
                                                int32_t end, int i, float4 sums) {
    const int lane = threadIdx.x % 32;
    const bool is_odd = lane / 4 % 2;
    const float2 low = pair_of_columns(sums.x, sums.y, is_odd),
                 high = pair_of_columns(sums.z, sums.w, is_odd);
    const int32_t row = x_row + i % Config::kColumnTiles * 8 + lane % 4 * 2 + is_odd;
    const int32_t first = column + lane / 4 / 2 * 2;
    const int r = i / Config::kColumnTiles;
    if (p.is_gated()) {
        write_pair<T>(p, row, first + 8 * r, end, low, high);
    } else {
        write_pair<T>(p, row, first + 16 * r, end, low, {});
        write_pair<T>(p, row, first + 16 * r + 8, end, high, {});
    }
}

}  // namespace octavo::cuda
