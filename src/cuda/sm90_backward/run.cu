#include "common/score.h"
#include "cuda/attention_backward/group_parts.h"
#include "cuda/attention_backward/run.h"
#include "cuda/sm90_attention/operand_map.h"
#include "cuda/sm90_backward/parameters.h"
#include "cuda/types.h"
#include "cuda/workspace.h"

#include <array>
#include <iterator>
#include <utility>

namespace octavo::cuda {

// One for each row of kSm90BackwardTiles, feature and type, compiled from instance.cu.in.
template <class T, int kRow, Sm90BackwardFeature kFeature>
void launch_sm90_backward(const AttentionBackwardParams&, const Sm90BackwardPlan&, const Sm90BackwardLaunch&,
                          cudaStream_t);

namespace {

using Launch = void (*)(const AttentionBackwardParams&, const Sm90BackwardPlan&, const Sm90BackwardLaunch&,
                        cudaStream_t);

template <class T, int kRow, Sm90BackwardFeature kFeature>
constexpr Launch launch_of() {
    if constexpr (has_instance(kSm90BackwardTiles[kRow], kFeature))
        return launch_sm90_backward<T, kRow, kFeature>;
    return nullptr;
}
// Those of a row follow one another.
template <class T, size_t... kIndices>
constexpr std::array<Launch, sizeof...(kIndices)> launches(std::index_sequence<kIndices...>) {
    constexpr size_t kFeatures = std::size(kSm90BackwardFeatures);
    return {launch_of<T, static_cast<int>(kIndices / kFeatures),
                      kSm90BackwardFeatures[kIndices % kFeatures]>()...};
}
using Indices = std::make_index_sequence<
    OCTAVO_HAS_SM90_KERNELS ? std::size(kSm90BackwardTiles) * std::size(kSm90BackwardFeatures) : 0>;

}  // namespace

void run(const AttentionBackwardParams& p, const Sm90BackwardPlan& plan, cudaStream_t stream) {
    const Workspace workspace(p.device.index, plan.workspace_bytes(), stream);
    const Sm90BackwardTiles& tiles = plan.tiles();
    char* next = workspace.bytes();
    auto take = [&](int64_t bytes) { return std::exchange(next, next + bytes); };
    int32_t* const counters = reinterpret_cast<int32_t*>(take(plan.counter_bytes()));
    char* const parts = take(plan.part_bytes);
    const AttentionBackwardParams divided =
        plan.group_parts > 1 ? GroupParts(p, plan.group_parts).divide(p, parts) : p;
    Sm90BackwardLaunch arguments{};
    const Sm90Operands operands(p), gradients(with_gradients(divided));
    const int queries = part_queries(tiles, plan.feature), columns = tiles.block_columns();
    arguments.q = map_of(operands.q, p.head_dim, 1, queries, columns);
    arguments.dout = map_of(gradients.q, p.head_dim_v, 1, queries, columns);
    arguments.k = map_of(operands.k, p.head_dim, 1, tiles.keys(), columns);
    arguments.v = map_of(operands.v, p.head_dim_v, 1, tiles.keys(), columns);
    arguments.dk = map_of(gradients.k, p.head_dim, 1, tiles.keys(), columns);
    arguments.dv = map_of(gradients.v, p.head_dim_v, 1, tiles.keys(), columns);
    arguments.q_edge = operands.q.edge;
    arguments.k_edge = operands.k.edge;
    arguments.group_parts = plan.group_parts;
    arguments.key_order = plan.key_order;
    arguments.query_order = plan.query_order;
    arguments.turn_order = plan.turn_order;
    if (tiles.dq_apart())
        arguments.dq = map_of(gradients.out, p.head_dim, 1, kSm90GradientQueries / kSm90GradientGroups);
    arguments.sequence_rows = plan.sequence_rows;
    arguments.num_rows = plan.num_rows;
    arguments.num_tiles = static_cast<int32_t>(plan.num_rows / tiles.queries);
    arguments.scale_log2 = p.softmax_scale * kLog2e;
    arguments.tiles_taken = counters;
    arguments.sums = {arguments.tiles_taken + FinishedCounts::kPartsTaken,
                      arguments.tiles_taken + FinishedCounts::kKeyTiles};
    arguments.num_counters = static_cast<int32_t>(plan.num_counters());
    arguments.lse = take(plan.lse_bytes());
    arguments.delta = take(plan.delta_bytes());
    arguments.dq_sums = reinterpret_cast<float*>(take(plan.dq_bytes()));
    arguments.dq_aligned = plan.dq_aligned;
    char* const slope_parts = take(plan.slope_bytes);
    if (plan.slope_bytes > 0) arguments.slopes = {reinterpret_cast<float*>(slope_parts), plan.slope_parts()};
    char* const sink_terms = take(plan.sink_bytes);
    if (p.dsinks) arguments.sinks = {reinterpret_cast<float*>(sink_terms), plan.num_rows};
    arguments.turns = reinterpret_cast<int32_t*>(next);
    static constexpr auto kFloat16 = launches<float16>(Indices{});
    static constexpr auto kBfloat16 = launches<bfloat16>(Indices{});
    const size_t index = plan.row * std::size(kSm90BackwardFeatures) + static_cast<size_t>(plan.feature);
    (plan.dtype == DType::float16 ? kFloat16 : kBfloat16).at(index)(divided, plan, arguments, stream);
    if (plan.group_parts > 1) launch_add_group_parts(p, divided, stream);
}

}  // namespace octavo::cuda
