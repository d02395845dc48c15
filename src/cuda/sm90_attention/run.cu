#include "cuda/attention/run.h"
#include "cuda/sm90_attention/launch_arguments.h"
#include "cuda/sm90_attention/parameters.h"
#include "cuda/sm90_attention/tiles.h"
#include "cuda/types.h"
#include "cuda/workspace.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace octavo::cuda {

// Each row of kSm90Tiles has one for each type, compiled from instance.cu.in.
template <class T, int kHeadDim, int kValueDim, int kWarpgroups, int kCtas>
void launch_sm90_attention(const AttentionParams&, const Sm90Plan&, const Sm90Launch&, cudaStream_t);
// Each row without pairs has one that gathers keys, compiled from gathered_instance.cu.in.
template <class T, int kHeadDim, int kValueDim, int kWarpgroups>
void launch_sm90_attention_gathered(const AttentionParams&, const Sm90Plan&, const Sm90Launch&, cudaStream_t);
// Each row of kSm90CodeTiles has some, compiled from code_instance.cu.in.
template <Sm90Cache kCache, int kHeadDim>
void launch_sm90_attention_codes(const AttentionParams&, const Sm90Plan&, const Sm90Launch&, cudaStream_t);

namespace {

using Launch = void (*)(const AttentionParams&, const Sm90Plan&, const Sm90Launch&, cudaStream_t);

template <class T, size_t... kRows>
constexpr std::array<Launch, sizeof...(kRows)> launches(std::index_sequence<kRows...>) {
    return {launch_sm90_attention<T, kSm90Tiles[kRows].head_dim, kSm90Tiles[kRows].value_dim,
                                  kSm90Tiles[kRows].warpgroups, kSm90Tiles[kRows].ctas>...};
}
// Rows of pairs, which serve no pages, have the launch of a row before them.
template <class T, size_t... kRows>
constexpr std::array<Launch, sizeof...(kRows)> gathering_launches(std::index_sequence<kRows...>) {
    return {launch_sm90_attention_gathered<T, kSm90Tiles[kRows].head_dim, kSm90Tiles[kRows].value_dim,
                                           kSm90Tiles[kRows].warpgroups>...};
}
template <Sm90Cache kCache, size_t... kRows>
constexpr std::array<Launch, sizeof...(kRows)> code_launches(std::index_sequence<kRows...>) {
    return {launch_sm90_attention_codes<kCache, kSm90CodeTiles[kRows].head_dim>...};
}
template <size_t kCount>
using Rows = std::make_index_sequence<OCTAVO_HAS_SM90_KERNELS ? kCount : 0>;

Launch find_launch(const Sm90Plan& plan) {
    static constexpr Rows<std::size(kSm90Tiles)> kRows;
    static constexpr Rows<std::size(kSm90CodeTiles)> kCodeRows;
    if (plan.codes != Codes::none) {
        static constexpr auto kOfHeads = code_launches<Sm90Cache::codes>(kCodeRows);
        static constexpr auto kOfTokens = code_launches<Sm90Cache::codes_of_tokens>(kCodeRows);
        return plan.token_scales ? kOfTokens.at(plan.row) : kOfHeads.at(plan.row);
    }
    if (plan.gathers) {
        static constexpr auto kFloat16 = gathering_launches<float16>(kRows);
        static constexpr auto kBfloat16 = gathering_launches<bfloat16>(kRows);
        return plan.dtype == DType::float16 ? kFloat16.at(plan.row) : kBfloat16.at(plan.row);
    }
    static constexpr auto kFloat16 = launches<float16>(kRows);
    static constexpr auto kBfloat16 = launches<bfloat16>(kRows);
    return plan.dtype == DType::float16 ? kFloat16.at(plan.row) : kBfloat16.at(plan.row);
}

}  // namespace

void run(const AttentionParams& p, const Sm90Plan& plan, cudaStream_t stream) {
    Sm90Launch arguments = launch_arguments(p, plan);
    arguments.codes = plan.codes;
    arguments.num_whole = plan.num_splits > 0 ? plan.num_whole : INT32_MAX;
    arguments.num_splits = plan.num_splits;
    arguments.split_blocks = plan.split_blocks;
    arguments.by_length = plan.by_length;
    const PersistentWorkspace workspace =
        persistent_workspace(p.device.index, stream, plan.partial_bytes, plan.num_counters);
    arguments.counter = reinterpret_cast<int32_t*>(workspace.counters);
    arguments.arrivals = workspace.counters + 1;
    arguments.partial = static_cast<float*>(workspace.partial);
    find_launch(plan)(p, plan, arguments, stream);
}

}  // namespace octavo::cuda
