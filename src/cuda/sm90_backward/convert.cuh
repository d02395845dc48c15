// Converts the sums of dQ, which lie in the order of accumulators, to scaled rows of the array dq. It runs
// after the kernel that adds to these sums.
//
// grid: x tiles of workspace, y query heads, the last head first. A warpgroup converts the part of a tile
// that one warpgroup of consumers summed.
#pragma once

#include "cuda/ptx/grid_dependency.h"
#include "cuda/sm90_backward/prepare.cuh"
#include "cuda/sm90_backward/tiles.h"
#include "cuda/types.h"

namespace octavo::cuda {

template <class T, class Config>
__global__ void __launch_bounds__(128 * Config::kDqParts)
    convert_dq_kernel(const __grid_constant__ AttentionBackwardParams p,
                      const __grid_constant__ Sm90BackwardLaunch plan) {
    constexpr int kColumns = Config::kDqColumns;
    constexpr int kStride = kColumns + 8;  // between rows in shared memory: eight lie in different banks
    constexpr bool kByRows = Config::kDqByRows;
    __shared__ __align__(16) T shared_rows[Config::kDqParts][64 * kStride];
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    const int64_t head = gridDim.y - 1 - blockIdx.y;  // the last sums first, from the L2 cache
    const int32_t first_row = static_cast<int32_t>(blockIdx.x) * Config::kQueries;
    const WorkspaceRow first = find_workspace_row<Config::kQueries>(p, plan, first_row);
    if (first.batch < 0) return;  // the tile has no query, since tiles begin with one
    const auto* const sums = reinterpret_cast<const float4*>(
        plan.dq_sums + (head * plan.num_rows + first_row) * Config::kHeadDim + group * 64 * kColumns);
    T* const rows = shared_rows[group] + thread / 32 * 16 * kStride;  // this warp's own
    T* const to = rows + lane / 4 * kStride + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
        const float4 x = sums[i * 128 + thread];
        const float scale = p.softmax_scale * p.out_scale;
        *reinterpret_cast<uint32_t*>(to + 8 * i) = pack<T>(x.x * scale, x.y * scale);
        *reinterpret_cast<uint32_t*>(to + 8 * kStride + 8 * i) = pack<T>(x.z * scale, x.w * scale);
    }
    __syncwarp();
    const int32_t seqlen_q =
        p.cu_seqlens_q ? p.cu_seqlens_q[first.batch + 1] - p.cu_seqlens_q[first.batch] : p.seqlen_q;
    const int32_t first_query = first.query + (kByRows ? 64 * group : 0) + thread / 32 * 16;
    const int32_t dim = Config::dq_column(group, 8 * (lane % 8));
    if (8 * (lane % 8) >= kColumns || dim >= p.head_dim) return;
    const int64_t begin =
        p.cu_seqlens_q ? p.cu_seqlens_q[first.batch] * p.dq_strides.token : first.batch * p.dq_strides.batch;
    T* const target = static_cast<T*>(p.dq) + begin + head * p.dq_strides.head + dim;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int32_t row = 4 * i + lane / 8;
        if (first_query + row >= seqlen_q) continue;
        T* const place = target + (first_query + row) * p.dq_strides.token;
        const T* const source = rows + row * kStride + 8 * (lane % 8);
        if (plan.dq_aligned) {
            *reinterpret_cast<uint4*>(place) = *reinterpret_cast<const uint4*>(source);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) place[j] = source[j];
        }
    }
}

}  // namespace octavo::cuda
