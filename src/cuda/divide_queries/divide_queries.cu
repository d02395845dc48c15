// Makes parts of sequences, with some of their queries each, which decode as sequences of their own.
//
//     sequence      | keys before                       | q0 q1 q2 q3 q4 q5 q6 q7 |
//     its first part| keys before                       | q0 q1 q2 q3 |
//     its second part| keys before, and those of q0 to q3             | q4 q5 q6 q7 |
//
// A part's queries are the last tokens of a shorter sequence in the same pages, so that positions and causal
// masks stay as they are. Parts of one sequence are decoded at the same time, and read its keys by way of the
// L2 cache. Page: docs/kernels/quantised_decode.md.
//
// grid: a CTA for each sequence. It writes the parts' lengths and offsets, and a row of page_table for each.
#include "common/fast_divide.h"
#include "cuda/attention/run.h"
#include "cuda/divide_queries/plan.h"
#include "cuda/launch.cuh"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/workspace.h"

namespace octavo::cuda {
namespace {

struct DivideLaunch {
    int32_t* seq_lens;  // of the parts; likewise the others
    int32_t* cu_seqlens_q;
    int32_t* page_table;
    int32_t parts, part_queries, max_pages;
    FastDivide page_size;
};

__global__ void __launch_bounds__(kDivideThreads)
    divide_queries_kernel(const __grid_constant__ AttentionParams p,
                          const __grid_constant__ DivideLaunch plan) {
    const auto sequence = static_cast<int32_t>(blockIdx.x), thread = static_cast<int32_t>(threadIdx.x);
    const int32_t first_part = sequence * plan.parts;
    const IndexArray pages = p.page_table.from(sequence * p.page_table_stride);
    auto copy = [&](int32_t column, int32_t page) {
        int32_t* const to = plan.page_table + int64_t{first_part} * plan.max_pages + column;
        for (int32_t part = 0; part < plan.parts; ++part) to[int64_t{part} * plan.max_pages] = page;
    };
    ptx::wait_for_previous_grid();
    ptx::launch_dependents();
    // The first pages are asked for together with the length, whether the sequence has them or not.
    constexpr int32_t kAhead = 4;
    int32_t ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
        const int32_t column = thread + i * kDivideThreads;
        ahead[i] = column < plan.max_pages ? pages[column] : 0;
    }
    const int32_t first = p.cu_seqlens_q[sequence], end = p.cu_seqlens_q[sequence + 1];
    const int32_t length = p.seq_lens[sequence];
    if (thread < plan.parts) {
        const int32_t begin = min(first + thread * plan.part_queries, end);
        const int32_t part_end = min(begin + plan.part_queries, end);
        plan.cu_seqlens_q[first_part + thread] = begin;
        // A part without queries reads nothing, and a sequence of length 0 is padding.
        plan.seq_lens[first_part + thread] =
            length == 0 || begin == part_end ? 0 : max(length - (end - part_end), 0);
    }
    if (thread == 0 && blockIdx.x + 1 == gridDim.x) plan.cu_seqlens_q[first_part + plan.parts] = end;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
        const int32_t column = thread + i * kDivideThreads;
        if (column < plan.max_pages) copy(column, ahead[i]);
    }
    const int32_t keys = max(length - p.num_skipped_keys, 0);
    const int32_t num_pages = min(plan.page_size.quotient(keys + p.page_size - 1), plan.max_pages);
    for (int32_t column = thread + kAhead * kDivideThreads; column < num_pages; column += kDivideThreads)
        copy(column, pages[column]);
}
static_assert(kMostParts <= kDivideThreads);

}  // namespace

void run(const AttentionParams& p, const DividedPlan& plan, cudaStream_t stream) {
    const Workspace workspace(p.device.index, plan.workspace_bytes(), stream, WorkspaceUser::divided_queries);
    const AttentionParams parts = over_parts(p, plan.parts, plan.part_queries, workspace.bytes());
    auto in_workspace = [&](const IndexArray& array) {
        auto* const numbers = reinterpret_cast<int32_t*>(workspace.bytes());
        return numbers + (array.data - numbers);
    };
    DivideLaunch arguments{};
    arguments.seq_lens = in_workspace(parts.seq_lens);
    arguments.cu_seqlens_q = in_workspace(parts.cu_seqlens_q);
    arguments.page_table = in_workspace(parts.page_table);
    arguments.parts = plan.parts;
    arguments.part_queries = plan.part_queries;
    arguments.max_pages = plan.max_pages;
    arguments.page_size = FastDivide::by(p.page_size);
    const LaunchShape shape{dim3(static_cast<unsigned>(plan.grid().size())), kDivideThreads, true};
    launch<divide_queries_kernel>(p.op, p.device.index, stream, shape, p, arguments);
    std::visit([&](const auto& decode) { run(parts, decode, stream); }, plan.decode);
}

}  // namespace octavo::cuda
