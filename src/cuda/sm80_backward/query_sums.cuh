// dQ as sums that the CTAs of all keys add to, in float32, in the order in which they come: key_gradients.cuh
// adds a tile of queries after the other, and the kernel here turns the sums into dQ. Without it,
// query_gradients.cuh computes scores and products once more, and gets the same bits every time.
#pragma once

#include "cuda/attention_backward/workspace_rows.h"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/ptx/reduce.h"
#include "cuda/sm80_backward/tile.cuh"

namespace octavo::cuda {

// How the warps of a CTA share a tile of dQ, or kDims of its columns: a warp has 16 queries and kColumns
// columns. `Config` is that of the keys' side, whose columns are queries.
template <class Config, int kDims>
struct QuerySums {
    static constexpr int kQueryTiles = Config::kKeys / 16;
    static constexpr int kColumns = kDims / (Config::kWarps / kQueryTiles);
    static_assert(Config::kWarps % kQueryTiles == 0 && kColumns % 16 == 0);
    using Rows = BackwardConfig<kColumns, Config::kWarps, 1, Config::kKeys, 1>;
    using Sums = float[1][kColumns / 8][4];

    int first_query, first_dim;  // of the warp, in the tile and among the CTA's columns

    __device__ __forceinline__ explicit QuerySums(int warp)
        : first_query(warp % kQueryTiles * 16), first_dim(warp / kQueryTiles * kColumns) {}

    // The place of this lane's first sum; `tile` is that of a tile of all columns. One instruction of a warp
    // reaches neighbouring sums.
    __device__ __forceinline__ static float* place(float* tile, int warp, int part) {
        return tile + part * Config::kKeys * kDims + warp * 16 * kColumns + threadIdx.x % 32 * kNeighbours;
    }
    __device__ __forceinline__ static void add(float* sums, const Sums& products) {
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i) {
            const float* const d = products[0][i];
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
        for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) products[0][i][j] = sums[i * 128 + j * (kNeighbours == 4 ? 1 : 32)];
        }
    }

  private:
#if __CUDA_ARCH__ >= 900
    static constexpr int kNeighbours = 4;  // sums of a lane that one instruction adds to
#else
    static constexpr int kNeighbours = 1;
#endif
};

// Gradients of scores on their way to the product with keys: [keys][queries] in shared memory.
template <class T, class Config>
struct ScoreGradientTile {
    static constexpr int kRowStride = Config::kKeys + 8;
    alignas(16) T rows[Config::kRows * kRowStride];

    // A warp writes its keys, from `first_key` of the tile on.
    __device__ __forceinline__ void put(const float (&gradients)[Config::kRowTiles][Config::kKeys / 8][4],
                                        int first_key) {
        const int lane = threadIdx.x % 32;
        T* const to = rows + (first_key + lane / 4) * kRowStride + 2 * (lane % 4);
#pragma unroll
        for (int t = 0; t < Config::kRowTiles; ++t) {
#pragma unroll
            for (int i = 0; i < Config::kKeys / 8; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float* const pair = gradients[t][i] + 2 * half;
                    *reinterpret_cast<uint32_t*>(to + (16 * t + 8 * half) * kRowStride + 8 * i) =
                        pack<T>(pair[0], pair[1]);
                }
            }
        }
    }
};

// products = dS K of the warp's queries and columns, over all keys of the CTA. `k`: the first key, at the
// first column of the CTA.
template <class T, class Config, int kDims>
__device__ __forceinline__ void multiply_ds_k(typename QuerySums<Config, kDims>::Sums& products,
                                              const QuerySums<Config, kDims>& part,
                                              const ScoreGradientTile<T, Config>& ds, const T* k) {
    using Part = QuerySums<Config, kDims>;
#pragma unroll
    for (int i = 0; i < Part::kColumns / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) products[0][i][j] = 0.0f;
    }
    const uint32_t ds_address = columns_address<ScoreGradientTile<T, Config>>(ds.rows + part.first_query);
    const uint32_t k_address = rows_address<Config>(k + part.first_dim);
#pragma unroll
    for (int key = 0; key < Config::kRows; key += 16) {
        uint32_t a[1][4];
        ptx::ldmatrix_x4_trans(a[0], ds_address + sizeof(T) * key * ScoreGradientTile<T, Config>::kRowStride);
        multiply_p_v<T, typename Part::Rows>(products, a, k_address + sizeof(T) * key * Config::kRowStride);
    }
}

// grid: x tiles of queries in workspace, y query heads, z parts of the columns.
template <class T, class Config, int kDimSplits>
__global__ void __launch_bounds__(Config::kThreads)
    convert_query_sums_kernel(const __grid_constant__ AttentionBackwardParams p,
                              const __grid_constant__ Sm80BackwardLaunch plan) {
    constexpr int kDims = Config::kHeadDim / kDimSplits;
    using Part = QuerySums<Config, kDims>;
    __shared__ __align__(16) T rows[Config::kWarps][16 * Part::Rows::kRowStride];
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const Part part(warp);
    const int64_t head = blockIdx.y, first_row = int64_t{blockIdx.x} * Config::kKeys;
    const WorkspaceRow first =
        find_workspace_row<Config::kKeys>(p, plan, static_cast<int32_t>(first_row) + part.first_query);
    if (first.batch < 0) return;
    typename Part::Sums sums;
    Part::read(
        Part::place(plan.dq_sums + (head * plan.num_rows + first_row) * Config::kHeadDim, warp, blockIdx.z),
        sums);
    const int32_t seqlen_q =
        p.cu_seqlens_q ? p.cu_seqlens_q[first.batch + 1] - p.cu_seqlens_q[first.batch] : p.seqlen_q;
    const int32_t first_dim = static_cast<int32_t>(blockIdx.z) * kDims + part.first_dim;
    const int64_t begin =
        p.cu_seqlens_q ? p.cu_seqlens_q[first.batch] * p.dq_strides.token : first.batch * p.dq_strides.batch;
    store_gradients<T, typename Part::Rows, Part::kColumns>(
        sums, p.softmax_scale, rows[warp],
        static_cast<T*>(p.dq) + begin + first.query * p.dq_strides.token + head * p.dq_strides.head +
            first_dim,
        p.dq_strides.token, plan.dq_aligned, seqlen_q - first.query,
        min(p.head_dim - first_dim, Part::kColumns));
}

}  // namespace octavo::cuda
