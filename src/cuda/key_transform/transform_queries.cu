// paged_attention over keys that were transformed before they became codes. These kernels transform the
// queries as well, and add to the log-sum-exp the term that all scores of a query lack, before sinks are
// added.
//
// grid of transform_queries_kernel: one warp per (token, query head).
#include "common/online_softmax.h"
#include "common/print_kernels.h"
#include "cuda/backend.h"
#include "cuda/key_transform/plan.h"
#include "cuda/launch.cuh"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/row_in_registers.cuh"
#include "cuda/rows.cuh"
#include "cuda/warp.cuh"
#include "cuda/workspace.h"

namespace octavo::cuda {
namespace {

// `queries`: [total_q, num_q_heads, head_dim]; `shifts`, unless null: [total_q, num_q_heads].
template <class T>
__global__ void transform_queries_kernel(const __grid_constant__ PagedAttentionParams p, T* queries,
                                         float* shifts) {
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const int64_t i = warp_row(), token = i / p.num_q_heads, head = i % p.num_q_heads;
    if (token >= p.total_q) return;
    const int64_t kv_head = head / p.group_size();
    const KeyTransform& transform = p.key_transform;
    Row row =
        load_row(static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride, p.head_dim);
    if (shifts) {
        float product = 0.0f;
        row.for_each(p.head_dim, [&](float x, int32_t d) { product += x * transform.offset_at(kv_head, d); });
        product = warp_sum(product);
        if (threadIdx.x % 32 == 0) shifts[i] = p.query_scale * product;
    }
    row.for_each(p.head_dim, [&](float& x, int32_t d) { x = transform.of_query(x, kv_head, d); });
    if (transform.rotates) row.rotate(p.head_dim);
    row.for_each(p.head_dim, [&](float x, int32_t d) { queries[i * p.head_dim + d] = from_float<T>(x); });
}

constexpr int32_t kShiftThreads = 128;

// grid: one thread per (token, query head). Tokens of no sequence are left as they are.
__global__ void shift_lse_kernel(const __grid_constant__ PagedAttentionParams p, const float* shifts) {
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const int64_t i = int64_t{blockIdx.x} * kShiftThreads + threadIdx.x;
    const int64_t token = i / p.num_q_heads, head = i % p.num_q_heads;
    if (token >= (p.cu_seqlens_q ? p.cu_seqlens_q[p.batch] : p.total_q)) return;
    float& lse = p.lse[token * p.lse_token_stride + head * p.lse_head_stride];
    lse = KeyTransform::of_lse(lse, shifts[i]);
}

// Runs in place of shift_lse_kernel where there are sinks. `lse`, with these strides, is the one that the
// attention kernel wrote.
template <class T>
__global__ void add_sinks_kernel(const __grid_constant__ PagedAttentionParams p, const float* shifts,
                                 float* lse, int64_t lse_token_stride, int64_t lse_head_stride) {
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const int64_t i = warp_row(), token = i / p.num_q_heads, head = i % p.num_q_heads;
    if (token >= (p.cu_seqlens_q ? p.cu_seqlens_q[p.batch] : p.total_q)) return;
    float& row_lse = lse[token * lse_token_stride + head * lse_head_stride];
    const MergeWeights weights = MergeWeights::make(KeyTransform::of_lse(row_lse, shifts[i]), p.sinks[head]);
    __syncwarp();  // all lanes have read the LSE
    if (threadIdx.x % 32 == 0) row_lse = weights.lse;
    T* const out = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
    for (int32_t d = threadIdx.x % 32; d < p.head_dim_v; d += 32)
        out[d] = from_float<T>(weights.merge(to_float(out[d]), 0.0f));
}

}  // namespace

void paged_attention(const PagedAttentionParams& p, void* stream) {
    const KeyTransformPlan plan = plan_key_transform(p);
    if (p.key_transform.is_identity() || plan.num_rows == 0) return attention(p, stream);
    if (prints_kernels()) print_kernel(describe(plan));
    const DeviceGuard guard(p.device.index);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const Workspace workspace(p.device.index, plan.workspace_bytes(), cuda_stream,
                              WorkspaceUser::transformed_queries);
    float* const shifts =
        plan.shifts_lse ? reinterpret_cast<float*>(workspace.bytes() + plan.query_bytes) : nullptr;
    with_type(p.dtype, [&](auto type) {
        using T = decltype(type);
        const LaunchShape shape{dim3(blocks_for_rows(plan.num_rows)), 32 * kRowsPerBlock, true};
        launch<transform_queries_kernel<T>>(p.op, p.device.index, cuda_stream, shape, p,
                                            reinterpret_cast<T*>(workspace.bytes()), shifts);
    });
    auto* const own_lse = reinterpret_cast<float*>(workspace.bytes() + plan.query_bytes + plan.shift_bytes);
    const AttentionParams transformed = p.with_queries(workspace.bytes(), own_lse);
    attention(transformed, stream);
    if (!shifts) return;
    if (plan.adds_sinks) {
        return with_type(p.dtype, [&](auto type) {
            const LaunchShape shape{dim3(blocks_for_rows(plan.num_rows)), 32 * kRowsPerBlock, true};
            launch<add_sinks_kernel<decltype(type)>>(
                p.op, p.device.index, cuda_stream, shape, p, static_cast<const float*>(shifts),
                transformed.lse, transformed.lse_token_stride, transformed.lse_head_stride);
        });
    }
    const LaunchShape shape{dim3(static_cast<unsigned>(ceil_divide(plan.num_rows, kShiftThreads))),
                            kShiftThreads, true};
    launch<shift_lse_kernel>(p.op, p.device.index, cuda_stream, shape, p, static_cast<const float*>(shifts));
}

}  // namespace octavo::cuda
