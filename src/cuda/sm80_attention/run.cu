#include "cuda/attention/run.h"
#include "cuda/sm80_attention/parameters.h"
#include "cuda/types.h"
#include "cuda/workspace.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace octavo::cuda {

// Each row of kSm80Tiles has one for each type, compiled from instance.cu.in.
template <class T, int kHeadDim, int kStages>
void launch_sm80_attention(const AttentionParams&, const Sm80Plan&, const Sm80Launch&, cudaStream_t);

namespace {

using Launch = void (*)(const AttentionParams&, const Sm80Plan&, const Sm80Launch&, cudaStream_t);

template <class T, size_t... kRows>
constexpr std::array<Launch, sizeof...(kRows)> launches(std::index_sequence<kRows...>) {
    return {launch_sm80_attention<T, kSm80Tiles[kRows].head_dim, kSm80Tiles[kRows].stages>...};
}
using Rows = std::make_index_sequence<std::size(kSm80Tiles)>;
constexpr auto kLaunchFloat16 = launches<float16>(Rows{});
constexpr auto kLaunchBfloat16 = launches<bfloat16>(Rows{});

}  // namespace

void run(const AttentionParams& p, const Sm80Plan& plan, cudaStream_t stream) {
    Sm80Launch arguments{};
    arguments.num_row_tiles = plan.num_row_tiles;
    arguments.num_splits = plan.num_splits;
    arguments.group_size = FastDivide::by(p.group_size());
    arguments.sequence_tiles = FastDivide::by(
        static_cast<uint32_t>(ceil_divide(int64_t{p.seqlen_q} * p.group_size(), plan.tiles().rows())));
    arguments.page_size = FastDivide::by(std::max(p.page_size, 1));
    arguments.q_aligned = plan.q_aligned;
    arguments.k_aligned = plan.k_aligned;
    arguments.v_aligned = plan.v_aligned;
    arguments.out_aligned = plan.out_aligned;
    const Workspace workspace(p.device.index, plan.workspace_bytes(), stream);
    arguments.partial_out = workspace.floats();
    arguments.partial_lse = arguments.partial_out + plan.num_partial_rows * p.head_dim_v;
    const auto& launches = plan.dtype == DType::float16 ? kLaunchFloat16 : kLaunchBfloat16;
    launches[plan.row](p, plan, arguments, stream);
}

}  // namespace octavo::cuda
