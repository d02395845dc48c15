// Adds up the gradients of ALiBi's slopes, after the other gradients, from the parts that their CTAs left.
#pragma once

#include "cuda/attention_backward/slope_parts.h"
#include "cuda/launch.cuh"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/rows.cuh"
#include "cuda/warp.cuh"

#include <cstdint>

namespace octavo::cuda {

// Adds up the parts in a fixed order. A sequence has kPerTile parts for each tile of kRows keys, or of kRows
// queries. grid: one warp per slope.
template <bool kOfKeys, int kRows, int kPerTile>
__global__ void slope_gradients_kernel(const __grid_constant__ AttentionBackwardParams p,
                                       const __grid_constant__ SlopeParts slopes) {
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const bool per_batch = p.dalibi_batch_stride != 0;
    const int64_t i = warp_row();
    if (i >= int64_t{p.num_q_heads} * (per_batch ? p.batch : 1)) return;
    const auto head = static_cast<int32_t>(i % p.num_q_heads);
    const int32_t first = per_batch ? static_cast<int32_t>(i / p.num_q_heads) : 0;
    const int32_t last = per_batch ? first + 1 : p.batch;
    float sum = 0.0f;
    for (int32_t batch = first; batch < last; ++batch) {
        const SequenceSlice seq = SequenceSlice::make(p, batch);
        const int32_t length = kOfKeys ? seq.see.seqlen_k : seq.seqlen_q;
        const float* const parts = slopes.of(p, head, batch);
        const int32_t count = (length + kRows - 1) / kRows * kPerTile;
        for (int32_t part = threadIdx.x % 32; part < count; part += 32) sum += parts[part];
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) p.dalibi_slopes[i] = sum;
}

template <bool kOfKeys, int kRows, int kPerTile>
void launch_slope_gradients(const AttentionBackwardParams& p, const SlopeParts& slopes, cudaStream_t stream) {
    const int64_t num_slopes = int64_t{p.num_q_heads} * (p.dalibi_batch_stride != 0 ? p.batch : 1);
    const LaunchShape shape{dim3(blocks_for_rows(num_slopes)), 32 * kRowsPerBlock, true};
    launch<slope_gradients_kernel<kOfKeys, kRows, kPerTile>>(p.op, p.device.index, stream, shape, p, slopes);
}

}  // namespace octavo::cuda
