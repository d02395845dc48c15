// Sums up the gradients of sinks from the term of each query, behind the kernel that computes the queries'
// statistics.
#include "cuda/attention_backward/run.h"
#include "cuda/launch.cuh"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/warp.cuh"

namespace octavo::cuda {
namespace {

constexpr int kThreads = 1024;

// Adds up the terms in a fixed order. grid: one CTA per query head.
__global__ void __launch_bounds__(kThreads) sink_gradients_kernel(const SinkTerms sinks, float* dsinks) {
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    __shared__ float sums[kThreads / 32];
    const float* const terms = sinks.terms + blockIdx.x * sinks.num_rows;
    float sum = 0.0f;
    for (int64_t row = threadIdx.x; row < sinks.num_rows; row += kThreads) sum += terms[row];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = warp_sum(sums[threadIdx.x]);
    if (threadIdx.x == 0) dsinks[blockIdx.x] = sum;
}
static_assert(kThreads / 32 == 32, "a lane adds what a warp has left");

}  // namespace

void launch_sink_gradients(const AttentionBackwardParams& p, const SinkTerms& sinks, cudaStream_t stream) {
    const LaunchShape shape{dim3(p.num_q_heads), kThreads, true};
    launch<sink_gradients_kernel>(p.op, p.device.index, stream, shape, sinks, p.dsinks);
}

}  // namespace octavo::cuda
