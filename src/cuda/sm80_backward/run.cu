#include "cuda/attention_backward/group_parts.h"
#include "cuda/attention_backward/run.h"
#include "cuda/runtime.h"
#include "cuda/sm80_backward/parameters.h"
#include "cuda/types.h"
#include "cuda/workspace.h"

#include <array>
#include <iterator>
#include <utility>

namespace octavo::cuda {

// Each row of kSm80BackwardTiles has one for each type, compiled from instance.cu.in.
template <class T, int kRow>
void launch_sm80_backward(const AttentionBackwardParams&, const Sm80BackwardPlan&, const Sm80BackwardLaunch&,
                          cudaStream_t);

namespace {

using Launch = void (*)(const AttentionBackwardParams&, const Sm80BackwardPlan&, const Sm80BackwardLaunch&,
                        cudaStream_t);

template <class T, size_t... kRows>
constexpr std::array<Launch, sizeof...(kRows)> launches(std::index_sequence<kRows...>) {
    return {launch_sm80_backward<T, static_cast<int>(kRows)>...};
}
using Rows = std::make_index_sequence<std::size(kSm80BackwardTiles)>;
constexpr auto kLaunchFloat16 = launches<float16>(Rows{});
constexpr auto kLaunchBfloat16 = launches<bfloat16>(Rows{});

}  // namespace

void run(const AttentionBackwardParams& p, const Sm80BackwardPlan& plan, cudaStream_t stream) {
    const Workspace workspace(p.device.index, plan.workspace_bytes(), stream);
    Sm80BackwardLaunch arguments{};
    char* next = workspace.bytes();
    char* const parts = std::exchange(next, next + plan.part_bytes);
    const AttentionBackwardParams divided =
        plan.group_parts > 1 ? GroupParts(p, plan.group_parts).divide(p, parts) : p;
    arguments.group_parts = plan.group_parts;
    auto take = [&](int64_t bytes) { return reinterpret_cast<float*>(std::exchange(next, next + bytes)); };
    arguments.statistics = reinterpret_cast<QueryStatistics*>(take(plan.statistics_bytes));
    float* const dq_sums = take(plan.dq_bytes());
    if (plan.dq_bytes() > 0) {
        arguments.dq_sums = dq_sums;
        arguments.num_rows = plan.num_rows;
        arguments.sequence_rows = plan.sequence_rows;
        check(cudaMemsetAsync(dq_sums, 0, plan.dq_bytes(), stream), p.op);
    }
    float* const slope_parts = take(plan.slope_bytes);
    if (plan.slope_bytes > 0) arguments.slopes = {slope_parts, plan.query_tiles};
    if (p.dsinks) arguments.sinks = {take(plan.sink_bytes), p.total_q};
    arguments.key_order = plan.key_order;
    arguments.query_tiles = plan.query_tiles;
    arguments.key_tiles = plan.key_tiles;
    arguments.q_aligned = plan.q_aligned;
    arguments.k_aligned = plan.k_aligned;
    arguments.v_aligned = plan.v_aligned;
    arguments.out_aligned = plan.out_aligned;
    arguments.dout_aligned = plan.dout_aligned;
    arguments.dq_aligned = plan.dq_aligned;
    arguments.dk_aligned = plan.dk_aligned;
    arguments.dv_aligned = plan.dv_aligned;
    const auto& launches = plan.dtype == DType::float16 ? kLaunchFloat16 : kLaunchBfloat16;
    launches[plan.row](divided, plan, arguments, stream);
    if (plan.group_parts > 1) launch_add_group_parts(p, divided, stream);
}

}  // namespace octavo::cuda
