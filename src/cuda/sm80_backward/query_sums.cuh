// dQ as sums that the CTAs of all keys add to, in float32, in the order in which they come: key_gradients.cuh
// adds a tile of queries after the other, and the kernel here turns the sums into dQ. Without it,
// query_gradients.cuh computes scores and products once more, and gets the same bits every time.
#pragma once

#include "cuda/attention_backward/workspace_rows.h"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/ptx/reduce.h"
#include "cuda/sm80_backward/tile.cuh"

namespace octavo::cuda {

// How the warps of a CTA share a tile of dQ: a warp has 16 or 32 queries, and kColumns columns. `Config` is
// that of the keys' side, whose columns are queries.
template <class Config>
struct QuerySums {
    // The columns of a warp with 32 queries; with 16 it has twice as many.
    static constexpr int kNarrow =
        Config::kKeys % 32 == 0 ? Config::kHeadDim * (Config::kKeys / 32) / Config::kWarps : 0;
    static constexpr int kRowTiles = kNarrow >= 32 && kNarrow % 16 == 0 ? 2 : 1;
    static constexpr int kWarpRows = 16 * kRowTiles, kTilesOfRows = Config::kKeys / kWarpRows;
    static constexpr int kColumns = Config::kHeadDim * kTilesOfRows / Config::kWarps;
    static_assert(Config::kWarps % kTilesOfRows == 0 && kColumns % 16 == 0);
    using Rows = BackwardConfig<kColumns, Config::kWarps, kRowTiles, Config::kKeys, 1>;
    using Sums = float[kRowTiles][kColumns / 8][4];

    int first_query, first_dim;  // of the warp, in the tile

    __device__ __forceinline__ explicit QuerySums(int warp)
        : first_query(warp % kTilesOfRows * kWarpRows), first_dim(warp / kTilesOfRows * kColumns) {}

    // The place of this lane's first sum in a tile. One instruction of a warp reaches neighbouring sums.
    __device__ __forceinline__ static float* place(float* tile, int warp) {
        return tile + warp * kWarpRows * kColumns + threadIdx.x % 32 * kNeighbours;
    }
    __device__ __forceinline__ static void add(float* sums, const Sums& products) {
#pragma unroll
        for (int i = 0; i < kRowTiles * kColumns / 8; ++i) {
            const float* const d = products[i / (kColumns / 8)][i % (kColumns / 8)];
#if __CUDA_ARCH__ >= 900
            ptx::add_to_global(sums + i * 128, d[0], d[1], d[2], d[3]);
#else
#pragma unroll
            for (int j = 0; j < 4; ++j) ptx::add_to_global(sums + i * 128 + j * 32, d[j]);
#endif
        }
    }
    __device__ __forceinline__ static void read(const float* sums, Sums& products) {
#pragma unroll
        for (int i = 0; i < kRowTiles * kColumns / 8; ++i) {
            float* const d = products[i / (kColumns / 8)][i % (kColumns / 8)];
#pragma unroll
            for (int j = 0; j < 4; ++j) d[j] = sums[i * 128 + j * (kNeighbours == 4 ? 1 : 32)];
        }
    }

  private:
#if __CUDA_ARCH__ >= 900
    static constexpr int kNeighbours = 4;  // sums of a lane that one instruction adds to
#else
    static constexpr int kNeighbours = 1;
#endif
};

// products = dS K of the warp's queries and columns, over all keys of the CTA.
template <class T, class Config, class Gradients>
__device__ __forceinline__ void multiply_ds_k(typename QuerySums<Config>::Sums& products,
                                              const QuerySums<Config>& part, const Gradients& ds,
                                              const T* k) {
    using Part = QuerySums<Config>;
#pragma unroll
    for (int i = 0; i < Part::kRowTiles * Part::kColumns / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) products[i / (Part::kColumns / 8)][i % (Part::kColumns / 8)][j] = 0.0f;
    }
    uint32_t ds_address[Part::kRowTiles];
#pragma unroll
    for (int t = 0; t < Part::kRowTiles; ++t) ds_address[t] = ds.columns(part.first_query + 16 * t);
    const uint32_t k_address = rows_address<Config>(k + part.first_dim);
#pragma unroll
    for (int key = 0; key < Config::kRows; key += 16) {
        uint32_t a[Part::kRowTiles][4];
#pragma unroll
        for (int t = 0; t < Part::kRowTiles; ++t)
            ptx::ldmatrix_x4_trans(a[t], ds_address[t] + key * Gradients::kRowBytes);
        multiply_p_v<T, typename Part::Rows>(products, a, k_address + sizeof(T) * key * Config::kRowStride);
    }
}

// grid: x tiles of queries in workspace, y query heads.
template <class T, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    convert_query_sums_kernel(const __grid_constant__ AttentionBackwardParams p,
                              const __grid_constant__ Sm80BackwardLaunch plan) {
    using Part = QuerySums<Config>;
    __shared__ __align__(16) T rows[Config::kWarps][Part::kWarpRows * Part::Rows::kRowStride];
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const Part part(warp);
    const int64_t head = blockIdx.y, first_row = int64_t{blockIdx.x} * Config::kKeys;
    const WorkspaceRow first =
        find_workspace_row<Config::kKeys>(p, plan, static_cast<int32_t>(first_row) + part.first_query);
    if (first.batch < 0) return;
    typename Part::Sums sums;
    Part::read(Part::place(plan.dq_sums + (head * plan.num_rows + first_row) * Config::kHeadDim, warp), sums);
    const int32_t seqlen_q =
        p.cu_seqlens_q ? p.cu_seqlens_q[first.batch + 1] - p.cu_seqlens_q[first.batch] : p.seqlen_q;
    const int64_t begin =
        p.cu_seqlens_q ? p.cu_seqlens_q[first.batch] * p.dq_strides.token : first.batch * p.dq_strides.batch;
    store_gradients<T, typename Part::Rows, Part::kColumns>(
        sums, p.softmax_scale, rows[warp],
        static_cast<T*>(p.dq) + begin + first.query * p.dq_strides.token + head * p.dq_strides.head +
            part.first_dim,
        p.dq_strides.token, plan.dq_aligned, seqlen_q - first.query,
        min(p.head_dim - part.first_dim, Part::kColumns));
}

}  // namespace octavo::cuda
