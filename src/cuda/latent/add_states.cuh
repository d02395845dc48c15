// How two partial results of the same rows come together, in the kernels whose threads have two rows of the
// sums: first their softmax states, and then their sums.
#pragma once

#include "common/online_softmax.h"
#include "cuda/ptx/exp2.h"

namespace octavo::cuda {

// Adds `others` to `states`, and says what each side's sums are multiplied by before they are added.
__device__ __forceinline__ void add_states(SoftmaxState (&states)[2], const SoftmaxState (&others)[2],
                                           float (&own_factors)[2], float (&other_factors)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float max = fmaxf(states[i].max, others[i].max), safe = max == -INFINITY ? 0.0f : max;
        own_factors[i] = ptx::exp2_approx(states[i].max - safe);
        other_factors[i] = ptx::exp2_approx(others[i].max - safe);
        states[i] = {max, states[i].sum * own_factors[i] + others[i].sum * other_factors[i]};
    }
}

// Adds four sums of another partial result, two of each row.
__device__ __forceinline__ void add_sums(float* sums, const float4& others, const float (&own_factors)[2],
                                         const float (&other_factors)[2]) {
    const float from[4] = {others.x, others.y, others.z, others.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = sums[i] * own_factors[i / 2] + from[i] * other_factors[i / 2];
}

}  // namespace octavo::cuda
