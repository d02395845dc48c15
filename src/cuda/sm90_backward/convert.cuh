// Converts the sums of dQ, which lie in the order of accumulators, to scaled rows of the array dq.
#pragma once

#include "cuda/ptx/grid_dependency.h"
#include "cuda/sm90_backward/parameters.h"
#include "cuda/sm90_backward/tiles.h"
#include "cuda/types.h"

namespace octavo::cuda {

// Converts sums of 16 queries of a warpgroup's part, which were one of its warps' accumulators: sums(i) are
// those of this lane for eight columns from 8 * i on. A warp calls together. `rows` is shared memory of its
// own; `first` is the first query of the tile.
template <class T, class Config, class Sums>
__device__ __forceinline__ void convert_dq_rows(const AttentionBackwardParams& p,
                                                const Sm90BackwardLaunch& plan, const WorkspaceRow& first,
                                                int32_t head, int part, int warp, T* rows, Sums sums) {
    constexpr int kColumns = Config::kDqColumns, kStride = kConvertedStride<Config>;
    const int lane = threadIdx.x % 32;
    const float scale = p.softmax_scale * p.out_scale;
    T* const to = rows + lane / 4 * kStride + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
        const float4 x = sums(i);
        *reinterpret_cast<uint32_t*>(to + 8 * i) = pack<T>(x.x * scale, x.y * scale);
        *reinterpret_cast<uint32_t*>(to + 8 * kStride + 8 * i) = pack<T>(x.z * scale, x.w * scale);
    }
    __syncwarp();
    const int32_t begin = p.cu_seqlens_q ? p.cu_seqlens_q[first.batch] : 0;
    const int32_t seqlen_q = p.cu_seqlens_q ? p.cu_seqlens_q[first.batch + 1] - begin : p.seqlen_q;
    const int32_t query = first.query + (Config::kDqByRows ? 64 * part : 0) + warp * 16 + lane / 8;
    const int32_t dim = Config::dq_column(part, 8 * (lane % 8));
    if (8 * (lane % 8) >= kColumns || dim >= p.head_dim) return;
    T* place = static_cast<T*>(p.dq) + (p.cu_seqlens_q ? 0 : first.batch * p.dq_strides.batch) +
               (begin + query) * p.dq_strides.token + head * p.dq_strides.head + dim;
    const T* const source = rows + lane / 8 * kStride + 8 * (lane % 8);
#pragma unroll
    for (int i = 0; i < 4; ++i, place += 4 * p.dq_strides.token) {
        if (query + 4 * i >= seqlen_q) continue;
        if (plan.dq_aligned) {
            *reinterpret_cast<uint4*>(place) = *reinterpret_cast<const uint4*>(source + 4 * i * kStride);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) place[j] = source[4 * i * kStride + j];
        }
    }
}

// All sums, where that kernel does not. grid: x tiles of workspace, y query heads, the last head first. A
// warpgroup converts the part of a tile that one warpgroup of consumers summed.
template <class T, class Config>
__global__ void __launch_bounds__(128 * Config::kDqParts)
    convert_dq_kernel(const __grid_constant__ AttentionBackwardParams p,
                      const __grid_constant__ Sm90BackwardLaunch plan) {
    __shared__ __align__(16) T shared_rows[4 * Config::kDqParts][16 * kConvertedStride<Config>];
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const int part = threadIdx.x / 128, thread = threadIdx.x % 128;
    // The last sums first, from the L2 cache.
    const auto head = static_cast<int32_t>(gridDim.y - 1 - blockIdx.y);
    const int32_t first_row = static_cast<int32_t>(blockIdx.x) * Config::kQueries;
    const WorkspaceRow first = find_workspace_row<Config::kQueries>(p, plan, first_row);
    if (first.batch < 0) return;  // the tile has no query, since tiles begin with one
    const auto* const sums =
        reinterpret_cast<const float4*>(plan.dq_sums + (head * plan.num_rows + first_row) * Config::kHeadDim +
                                        part * 64 * Config::kDqColumns);
    convert_dq_rows<T, Config>(p, plan, first, head, part, thread / 32, shared_rows[threadIdx.x / 32],
                               [&](int i) { return sums[i * 128 + thread]; });
}

}  // namespace octavo::cuda
