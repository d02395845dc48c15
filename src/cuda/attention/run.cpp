// Executes plans.
#include "cuda/attention/run.h"
#include "common/print_kernels.h"
#include "cuda/attention/plan.h"
#include "cuda/backend.h"
#include "cuda/runtime.h"
#include "cuda/workspace.h"
#include "params/shared_prefix.h"

#include <variant>

namespace octavo::cuda {
namespace {

// The batch without its first `count` sequences.
AttentionParams behind(AttentionParams p, int32_t count) {
    p.batch -= count;
    if (p.cu_seqlens_q) {
        p.cu_seqlens_q = p.cu_seqlens_q.from(count);
    } else {
        const int64_t size = size_of(p.dtype);
        p.q = static_cast<const char*>(p.q) + count * p.q_batch_stride * size;
        p.out = static_cast<char*>(p.out) + count * p.out_batch_stride * size;
        if (p.lse) p.lse += count * p.lse_batch_stride;
        if (p.has_tree_mask) p.tree_mask += int64_t{2} * count * p.seqlen_q;
    }
    p.page_table = p.page_table.from(count * p.page_table_stride);
    if (p.seq_lens) {
        p.seq_lens = p.seq_lens.from(count);
    } else {
        p.total_k -= count * p.seqlen_k;
    }
    if (p.prefix_lens) p.prefix_lens = p.prefix_lens.from(count);
    if (p.ranges) p.ranges = p.ranges.from_sequence(count);
    if (p.chosen_pages) p.chosen_pages.lists = p.chosen_pages.list(count, 0);
    if (p.alibi_slopes) p.alibi_slopes += count * p.alibi_batch_stride;
    return p;
}

// Launches `plan`, and the further plans that the rest of the batch needs.
void run_kernels(AttentionParams p, KernelPlan plan, cudaStream_t stream) {
    for (;;) {
        if (prints_kernels()) print_kernel(describe(plan));
        const int32_t count = num_sequences(plan), rest = p.batch - count;
        p.batch = count;
        std::visit([&](const auto& plan) { run(p, plan, stream); }, plan);
        if (rest == 0) return;
        p.batch += rest;
        p = behind(p, count);
        plan = plan_rest(p, gpu_of(p.device.index));
    }
}

}  // namespace

void run(const AttentionParams& p, const SharedPrefixPlan& plan, cudaStream_t stream) {
    if (prints_kernels()) print_kernel(describe(plan));
    const Workspace workspace(p.device.index, plan.workspace_bytes(), stream, WorkspaceUser::shared_prefix);
    const int64_t num_rows = p.total_q * p.num_q_heads;
    char* const out = workspace.bytes();
    auto* const lse = reinterpret_cast<float*>(out + plan.out_bytes);
    const AttentionParams over_prefix = over_shared_prefix(p, plan.run_len, out, lse);
    AttentionParams behind_prefix = after_shared_prefix(p, lse + plan.num_runs * num_rows);
    run_kernels(over_prefix, plan.over_prefix, stream);  // it comes first, since `out` may be q
    if (plan.overlaps) {
        behind_prefix.out = out + plan.num_runs * num_rows * p.head_dim_v * size_of(p.dtype);
        behind_prefix.out_head_stride = p.head_dim_v;
        behind_prefix.out_token_stride = behind_prefix.out_batch_stride =
            int64_t{p.num_q_heads} * p.head_dim_v;
        run(behind_prefix, std::get<SplitKvPlan>(plan.behind_prefix), stream, Beside::prefix);
    } else {
        run_kernels(behind_prefix, plan.behind_prefix, stream);
    }
    combine_prefix(p, behind_prefix, over_prefix, stream);
}

void attention(const AttentionParams& p, void* stream) {
    const DeviceGuard guard(p.device.index);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const AttentionPlan plan = plan_attention(p, gpu_of(p.device.index));
    if (const auto* kernel = std::get_if<KernelPlan>(&plan)) run_kernels(p, *kernel, cuda_stream);
    if (const auto* shared = std::get_if<SharedPrefixPlan>(&plan)) run(p, *shared, cuda_stream);
}

}  // namespace octavo::cuda
