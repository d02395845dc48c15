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
void launch_split_kv_decode(const AttentionParams&, const SplitKvPlan&, bool, cudaStream_t);

namespace {

struct Launches {
    void (*stream_k)(const AttentionParams&, const StreamKPlan&, cudaStream_t);
    void (*split_kv)(const AttentionParams&, const SplitKvPlan&, bool, cudaStream_t);
};

template <class T, size_t... kRows>
constexpr std::array<Launches, sizeof...(kRows)> launches(std::index_sequence<kRows...>) {
    return {
        Launches{launch_stream_k_decode<T, kDecodeTiles[kRows].head_dim, kDecodeTiles[kRows].row_tiles>,
                 launch_split_kv_decode<T, kDecodeTiles[kRows].head_dim, kDecodeTiles[kRows].row_tiles>}...};
}
using Rows = std::make_index_sequence<std::size(kDecodeTiles)>;
constexpr auto kLaunchFloat16 = launches<float16>(Rows{});
constexpr auto kLaunchBfloat16 = launches<bfloat16>(Rows{});

template <class Plan>
const Launches& launches_of(const Plan& plan) {
    return (plan.dtype == DType::float16 ? kLaunchFloat16 : kLaunchBfloat16)[plan.row];
}

}  // namespace

void run(const AttentionParams& p, const SplitKvPlan& plan, cudaStream_t stream, bool overlaps_prefix) {
    launches_of(plan).split_kv(p, plan, overlaps_prefix, stream);
}

void run(const AttentionParams& p, const StreamKPlan& plan, cudaStream_t stream) {
    launches_of(plan).stream_k(p, plan, stream);
}

}  // namespace octavo::cuda
