// Merges two partial results by their LSE. grid: one warp per row.
#include "common/online_softmax.h"
#include "common/print_kernels.h"
#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/merge_states/plan.h"
#include "cuda/rows.cuh"

namespace octavo::cuda {
namespace {

template <class T>
__global__ void merge_states_kernel(const __grid_constant__ MergeStatesParams p) {
    const int64_t row = warp_row();
    if (row >= p.shape[0] * p.shape[1] * p.shape[2]) return;
    const int64_t index[3] = {row / p.shape[2] / p.shape[1], row / p.shape[2] % p.shape[1], row % p.shape[2]};
    auto offset = [&](const int64_t (&strides)[3]) {
        return index[0] * strides[0] + index[1] * strides[1] + index[2] * strides[2];
    };
    const MergeWeights weights =
        MergeWeights::make(p.lse_a[offset(p.lse_a_strides)], p.lse_b[offset(p.lse_b_strides)]);
    const T* const a = static_cast<const T*>(p.out_a) + offset(p.out_a_strides);
    const T* const b = static_cast<const T*>(p.out_b) + offset(p.out_b_strides);
    T* const out = static_cast<T*>(p.out) + offset(p.out_strides);
    __syncwarp();  // every lane has read the LSEs, which the result may overwrite
    for (int i = threadIdx.x % 32; i < p.head_dim; i += 32) {
        out[i] = from_float<T>(weights.merge(to_float(a[i]), to_float(b[i])));
    }
    if (threadIdx.x % 32 == 0) p.lse[offset(p.lse_strides)] = weights.lse;
}

}  // namespace

void merge_states(const MergeStatesParams& p, void* stream) {
    const MergeStatesPlan plan = plan_merge_states(p);
    if (plan.num_rows == 0) return;
    if (prints_kernels()) print_kernel(describe(plan));
    const DeviceGuard guard(p.device.index);
    const LaunchShape shape{dim3(blocks_for_rows(plan.num_rows)), 32 * kRowsPerBlock};
    with_type(p.dtype, [&](auto type) {
        launch<merge_states_kernel<decltype(type)>>("merge_states", p.device.index,
                                                    static_cast<cudaStream_t>(stream), shape, p);
    });
}

}  // namespace octavo::cuda
