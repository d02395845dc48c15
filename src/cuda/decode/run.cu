#include "cuda/attention/run.h"
#include "cuda/types.h"

#include <array>
#include <iterator>
#include <utility>

namespace octavo::cuda {

// One for each row of kDecodeTiles and each type, compiled from instance.cu.in.
template <class T, int kHeadDim, int kRowTiles>
void launch_stream_k_decode(const AttentionParams&, const StreamKPlan&, cudaStream_t);
template <class T, int kHeadDim, int kRowTiles>
void launch_batch_invariant_decode(const AttentionParams&, const BatchInvariantDecodePlan&, cudaStream_t);
template <class T, int kHeadDim, int kRowTiles, SplitPolicy kPolicy>
void launch_split_kv_decode(const AttentionParams&, const SplitKvPlan&, cudaStream_t);

namespace {

template <class Plan>
using Launch = void (*)(const AttentionParams&, const Plan&, cudaStream_t);

struct Launches {
    Launch<StreamKPlan> stream_k;
    Launch<BatchInvariantDecodePlan> batch_invariant;
    Launch<SplitKvPlan> even, by_length, fixed;

    template <class T, int kHeadDim, int kRowTiles>
    static constexpr Launches of() {
        return {launch_stream_k_decode<T, kHeadDim, kRowTiles>,
                launch_batch_invariant_decode<T, kHeadDim, kRowTiles>,
                launch_split_kv_decode<T, kHeadDim, kRowTiles, SplitPolicy::even>,
                launch_split_kv_decode<T, kHeadDim, kRowTiles, SplitPolicy::by_length>,
                launch_split_kv_decode<T, kHeadDim, kRowTiles, SplitPolicy::fixed>};
    }
};

template <class T, size_t... kRows>
constexpr std::array<Launches, sizeof...(kRows)> launches(std::index_sequence<kRows...>) {
    return {Launches::of<T, kDecodeTiles[kRows].head_dim, kDecodeTiles[kRows].row_tiles>()...};
}
using Rows = std::make_index_sequence<std::size(kDecodeTiles)>;
constexpr auto kLaunchFloat16 = launches<float16>(Rows{});
constexpr auto kLaunchBfloat16 = launches<bfloat16>(Rows{});

template <class Plan>
const Launches& launches_of(const Plan& plan) {
    return (plan.dtype == DType::float16 ? kLaunchFloat16 : kLaunchBfloat16)[plan.row];
}

}  // namespace

void run(const AttentionParams& p, const SplitKvPlan& plan, cudaStream_t stream) {
    const Launches& launches = launches_of(plan);
    switch (plan.policy) {
        case SplitPolicy::even: return launches.even(p, plan, stream);
        case SplitPolicy::by_length: return launches.by_length(p, plan, stream);
        case SplitPolicy::fixed: return launches.fixed(p, plan, stream);
    }
}

void run(const AttentionParams& p, const BatchInvariantDecodePlan& plan, cudaStream_t stream) {
    launches_of(plan).batch_invariant(p, plan, stream);
}

void run(const AttentionParams& p, const StreamKPlan& plan, cudaStream_t stream) {
    launches_of(plan).stream_k(p, plan, stream);
}

}  // namespace octavo::cuda
