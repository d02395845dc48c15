// The last step of cascade inference: combines the results of all queries over the shared prefix with those
// of each sequence's queries over its keys behind the prefix. Page: docs/kernels/shared_prefix.md.
#include "common/score.h"
#include "cuda/alignment.h"
#include "cuda/attention/run.h"
#include "cuda/columns.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/rows.cuh"
#include "cuda/shared_prefix/plan.h"
#include "cuda/types.h"
#include "cuda/warp.cuh"

namespace octavo::cuda {
namespace {

// The length of the sequence that a query belongs to.
__device__ int32_t length_of_sequence(const AttentionParams& p, int64_t token) {
    if (!p.cu_seqlens_q) return p.seq_lens[token];
    int32_t first = 0, last = p.batch - 1;  // the sequence lies between these
    while (first < last) {
        const int32_t middle = (first + last) / 2;
        if (p.cu_seqlens_q[middle + 1] > token)
            last = middle;
        else
            first = middle + 1;
    }
    return p.seq_lens[first];
}

// Combines the results over the runs of the prefix, [num_runs, rows, head_dim_v] and [num_runs, rows], with
// those behind the prefix, which are the out and lse of `behind`, into p's out and lse. Both may be the same
// arrays.
//
// grid: one warp per row of [total_q, num_q_heads].
template <class T, int kWide>
__global__ void combine_prefix_kernel(const __grid_constant__ AttentionParams p,
                                      const __grid_constant__ AttentionParams behind, const T* prefix_out,
                                      const float* prefix_lse, int32_t num_runs) {
    ptx::wait_for_previous_grid();
    ptx::launch_dependents();
    const int lane = threadIdx.x % 32;
    const int64_t row = warp_row(), num_rows = p.total_q * p.num_q_heads;
    const int64_t token = row / p.num_q_heads, head = row - token * p.num_q_heads;
    if (row >= num_rows || (p.cu_seqlens_q && token >= p.cu_seqlens_q[p.batch])) return;

    const float rest_lse_log2 =
        kLog2e * behind.lse[token * behind.lse_token_stride + head * behind.lse_head_stride];
    const bool empty =  // whether the sequence has length 0
        rest_lse_log2 == -INFINITY && (!p.has_tree_mask || length_of_sequence(p, token) == 0);
    const float lse_log2 = lane < num_runs && !empty ? prefix_lse[lane * num_rows + row] * kLog2e : -INFINITY;
    const float sink_log2 = p.sinks ? p.sinks[head] * kLog2e : -INFINITY;
    const float highest = warp_max(fmaxf(fmaxf(rest_lse_log2, lse_log2), sink_log2));
    const float max = highest == -INFINITY ? 0.0f : highest;
    float rest_weight = exp2f(rest_lse_log2 - max), weight = exp2f(lse_log2 - max);
    const float sum = warp_sum(weight) + rest_weight + exp2f(sink_log2 - max);
    rest_weight = empty ? 0.0f : rest_weight / sum;
    weight = empty ? 0.0f : weight / sum;

    using Wide = Columns<T, kWide>;
    const auto* const rest = reinterpret_cast<const Wide*>(
        static_cast<const T*>(behind.out) + token * behind.out_token_stride + head * behind.out_head_stride);
    auto* const out = reinterpret_cast<Wide*>(static_cast<T*>(p.out) + token * p.out_token_stride +
                                              head * p.out_head_stride);
    for (int32_t first = 0; first < p.head_dim_v; first += 32 * kWide) {  // all lanes take every turn
        const int32_t column = first + kWide * lane;
        const int32_t at = column < p.head_dim_v ? column / kWide : 0;
        Wide result = rest[at];
        float merged[kWide];
#pragma unroll
        for (int j = 0; j < kWide; ++j) merged[j] = rest_weight * to_float(result.at[j]);
#pragma unroll 4
        for (int32_t run = 0; run < (empty ? 0 : num_runs); ++run) {
            const float run_weight = __shfl_sync(~0u, weight, run);
            const Wide from =
                reinterpret_cast<const Wide*>(prefix_out + (run * num_rows + row) * p.head_dim_v)[at];
#pragma unroll
            for (int j = 0; j < kWide; ++j) merged[j] += run_weight * to_float(from.at[j]);
        }
#pragma unroll
        for (int j = 0; j < kWide; ++j) result.at[j] = from_float<T>(merged[j]);
        if (column < p.head_dim_v) out[at] = result;
    }
    if (lane == 0 && p.lse)
        p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = (max + log2f(sum)) * kLn2;
}

template <class T, int kWide>
void launch_combine(const AttentionParams& p, const AttentionParams& behind, const AttentionParams& prefix,
                    cudaStream_t stream) {
    const LaunchShape shape{dim3(blocks_for_rows(p.total_q * p.num_q_heads)), 32 * kRowsPerBlock, true};
    launch<combine_prefix_kernel<T, kWide>>(p.op, p.device.index, stream, shape, p, behind,
                                            static_cast<const T*>(prefix.out), prefix.lse, prefix.batch);
}

template <class T>
void combine(const AttentionParams& p, const AttentionParams& behind, const AttentionParams& prefix,
             cudaStream_t stream) {
    constexpr int kWide = 4;
    const bool wide = aligned(p.out, kWide * sizeof(T), {p.out_token_stride, p.out_head_stride}, p.dtype);
    (wide ? launch_combine<T, kWide> : launch_combine<T, 1>)(p, behind, prefix, stream);
}

}  // namespace

void combine_prefix(const AttentionParams& p, const AttentionParams& behind_prefix,
                    const AttentionParams& over_prefix, cudaStream_t stream) {
    const bool is_float16 = p.dtype == DType::float16;
    (is_float16 ? combine<float16> : combine<bfloat16>)(p, behind_prefix, over_prefix, stream);
}

}  // namespace octavo::cuda
