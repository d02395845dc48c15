#include "common/print_kernels.h"
#include "cuda/backend.h"
#include "cuda/latent/combine.cuh"
#include "cuda/launch.cuh"
#include "cuda/partial_workspace.h"
#include "cuda/sm90_latent/combine.cuh"
#include "cuda/tma/tensor_map.h"
#include "cuda/workspace.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace octavo::cuda {

// There is one for each type, kind of cache and row of kLatentTiles, compiled from instance.cu.in.
template <class T, bool kIsFp8, int kRow>
void launch_latent(const LatentAttentionParams&, const LatentPlan&, const LatentLaunch&, cudaStream_t);

// Compiled from sm90_latent/instance.cu.in. The tensor map is for Sm90LatentCache::numbers alone.
template <class T, Sm90LatentCache kCache>
void launch_sm90_latent(const LatentAttentionParams&, const LatentPlan&, const LatentLaunch&,
                        const CUtensorMap&, cudaStream_t);

// Compiled from latent_decode/instance.cu.in.
template <class T, bool kIsFp8>
void launch_latent_decode(const LatentAttentionParams&, const LatentPlan&, const LatentLaunch&, cudaStream_t);

namespace {

// The tensor map of pages as sm90_latent copies them: 64 numbers of up to 64 keys of a page. The stride of a
// single page is never used, and may be zero, which the copy engine refuses.
CUtensorMap map_of_pages(const LatentAttentionParams& p) {
    return make_tensor_map(p.kv, {{kLatentQkDim, p.page_size, p.num_pages, 1, 1},
                                  {p.kv_slot_stride, p.num_pages > 1 ? p.kv_page_stride : 8, 8, 8},
                                  {64, std::min(p.page_size, kSm90LatentKeys), 1, 1, 1}});
}

using Launch = void (*)(const LatentAttentionParams&, const LatentPlan&, const LatentLaunch&, cudaStream_t);

template <class T, bool kIsFp8, size_t... kRows>
constexpr std::array<Launch, sizeof...(kRows)> launches(std::index_sequence<kRows...>) {
    return {launch_latent<T, kIsFp8, kRows>...};
}
template <class T, bool kIsFp8>
constexpr auto kLaunches = launches<T, kIsFp8>(std::make_index_sequence<std::size(kLatentTiles)>());

template <class T>
void run(const LatentAttentionParams& p, const LatentPlan& plan, const LatentLaunch& arguments,
         cudaStream_t stream) {
    if constexpr (OCTAVO_HAS_SM90_KERNELS) {
        if (plan.kernel == LatentKernel::latent_decode) {
            if (plan.is_fp8())
                launch_latent_decode<T, true>(p, plan, arguments, stream);
            else
                launch_latent_decode<T, false>(p, plan, arguments, stream);
        }
        if (plan.kernel == LatentKernel::sm90_latent) {
            switch (plan.cache()) {
                case Sm90LatentCache::numbers:
                    launch_sm90_latent<T, Sm90LatentCache::numbers>(p, plan, arguments, map_of_pages(p),
                                                                    stream);
                    break;
                case Sm90LatentCache::gathered:
                    launch_sm90_latent<T, Sm90LatentCache::gathered>(p, plan, arguments, {}, stream);
                    break;
                case Sm90LatentCache::fp8:
                    launch_sm90_latent<T, Sm90LatentCache::fp8>(p, plan, arguments, {}, stream);
                    break;
            }
        }
        if (plan.has_slots()) {
            const LaunchShape shape{
                dim3(static_cast<unsigned>(plan.num_row_tiles()) * kCombineSm90LatentBands),
                kCombineSm90LatentThreads, true};
            launch<combine_sm90_latent_kernel<T>>("latent_attention", p.device.index, stream, shape, p,
                                                  arguments);
        }
    }
    if (plan.kernel == LatentKernel::latent)
        (plan.is_fp8() ? kLaunches<T, true> : kLaunches<T, false>)[plan.row](p, plan, arguments, stream);
    if (plan.num_partials() <= 1) return;
    const LaunchShape shape{dim3(static_cast<unsigned>(plan.total_rows)), kCombineLatentThreads, true};
    launch<combine_latent_kernel<T>>("latent_attention", p.device.index, stream, shape, p, arguments);
}

}  // namespace

void latent_attention(const LatentAttentionParams& p, void* stream) {
    const DeviceGuard guard(p.device.index);
    const LatentPlan plan = plan_latent_attention(p, gpu_of(p.device.index));
    if (plan.num_row_tiles() == 0) return;
    if (prints_kernels()) print_kernel(describe(plan));
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const Workspace workspace(p.device.index, plan.workspace_bytes(), cuda_stream);
    LatentLaunch arguments{};
    arguments.tiles_per_sequence = FastDivide::by(plan.tiles_per_sequence);
    arguments.num_q_heads = FastDivide::by(p.num_q_heads);
    arguments.page_size = FastDivide::by(p.page_size);
    arguments.num_splits = plan.num_splits;
    arguments.cluster = plan.cluster;
    arguments.num_partials = plan.num_partials();
    arguments.q_aligned = plan.q_aligned;
    arguments.kv_aligned = plan.kv_aligned;
    arguments.partial_out = workspace.floats();
    arguments.partial_lse = arguments.partial_out + plan.num_partial_rows() * kLatentVDim;
    arguments.runs = reinterpret_cast<LatentRuns*>(arguments.partial_out + plan.partial_numbers());
    arguments.partial = partial_workspace(p.device.index, cuda_stream, plan.workspace_words());
    if (p.dtype == DType::float16)
        run<float16>(p, plan, arguments, cuda_stream);
    else
        run<bfloat16>(p, plan, arguments, cuda_stream);
}

}  // namespace octavo::cuda
