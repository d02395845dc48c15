// Launches the instances of the decode kernels of one row of kDecodeTiles.
#pragma once

#include "cuda/decode/plain_calls.h"
#include "cuda/decode/plan.h"
#include "cuda/decode/split_kv.cuh"
#include "cuda/decode/stream_k.cuh"
#include "cuda/launch.cuh"
#include "cuda/partial_workspace.h"

#include <type_traits>

namespace octavo::cuda {

static __device__ const float kOneScale = 1.0f;

// A pointer to a one on the current device, where only keys or only values have scales in memory; null
// otherwise.
inline const float* one_scale(const AttentionParams& p) {
    if ((p.k_scales.data != nullptr) == (p.v_scales.data != nullptr)) return nullptr;
    void* address = nullptr;
    check(cudaGetSymbolAddress(&address, kOneScale), p.op);
    return static_cast<const float*>(address);
}

template <class T, class Config, SplitKvCalls kCalls>
void launch_split_kv_kernel(const AttentionParams& params, const SplitKvPlan& plan,
                            const SplitKvLaunch& arguments, cudaStream_t stream) {
    constexpr size_t kSharedBytes = sizeof(SplitKvShared<Config>);
    static_assert(kSharedBytes <= kDecodeSharedBytes);
    static_assert(Config::kCtas * (kSharedBytes + 1024) <= 228 * 1024, "1 KB of each CTA is the system's");
    const Grid grid = plan.grid();
    const LaunchShape shape{dim3(grid.x, grid.y, grid.z), Config::kThreads, true};
    launch<split_kv_decode_kernel<T, Config, kCalls>, kSharedBytes>(params.op, params.device.index, stream,
                                                                    shape, params, arguments);
}

// Whether a launch starts to read keys before earlier kernels have ended, as static_past allows it. Not so
// where all CTAs of the launch may find nothing to do, and none would wait.
inline bool waits_for_new_alone(const AttentionParams& p) {
    return p.static_past && !p.chosen_pages && p.most_queries == 0;
}

// What launches the instance of a configuration for calls without fixed splits, whose items have up to `rows`
// rows.
template <class T, class Config>
constexpr auto split_kv_launcher([[maybe_unused]] bool plain, [[maybe_unused]] int64_t rows) {
    if constexpr (has_plain_calls(Config::kHeadDim, Config::kCodes)) {
        if constexpr (has_four_rows(Config::kRowTiles, Config::kCodes)) {
            using OfFourRows = typename Config::OfFourRows;
            if (plain && rows <= OfFourRows::kRows)
                return launch_split_kv_kernel<T, OfFourRows, SplitKvCalls::plain>;
        }
        if (plain) return launch_split_kv_kernel<T, Config, SplitKvCalls::plain>;
    }
    return launch_split_kv_kernel<T, Config, SplitKvCalls::all>;
}

// Behind a shared prefix, this grid must not complete before the kernel over the prefix does. It is enough
// that the CTAs of the last sequence wait for that kernel: the first of them has work whatever the lengths
// are, unless splits are by length. The other CTAs end, and leave their places to CTAs that have not started.
// But where CTAs have much to read, more of them beside that kernel would slow it down, so all wait. (On an
// H200, 64 sequences of 1024 keys behind a prefix of 1024 took 78 us where the last ones wait and 72 us where
// all do; sequences of 256 keys behind 4096, 32 and 35 us.)
inline uint32_t first_that_waits(const SplitKvPlan& plan, int64_t block_bytes) {
    constexpr int64_t kMuch = 512 * 1024;
    return plan.max_visible_blocks * block_bytes < kMuch * plan.num_splits ? plan.num_sequences - 1 : 0;
}

template <class T, int kHeadDim, int kRowTiles, Codes kCodes>
void launch_split_kv_decode(const AttentionParams& params, const SplitKvPlan& plan, Beside beside,
                            cudaStream_t stream) {
    using Long = LongItems<kHeadDim, kRowTiles, kCodes>;
    using Short = ShortItems<kHeadDim, kRowTiles, kCodes>;
    using Many = ManyItems<kHeadDim, kRowTiles, kCodes>;
    // The configuration that serves short items, unless their splits are fixed.
    using ShortOrMany = std::conditional_t<has_short_items<kHeadDim, kRowTiles, kCodes>(), Short, Many>;
    SplitKvLaunch arguments{};
    arguments.group_size = FastDivide::by(params.group_size());
    arguments.pages = PageLayout::of(params, Long::kBlockKeys);
    arguments.codes = CodeLayout::of(params, kHeadDim, plan.group_parts, one_scale(params));
    arguments.num_splits = plan.num_splits;
    arguments.num_slots = plan.num_slots;
    arguments.equal_splits = plan.num_slots / plan.num_sequences;
    arguments.combiners_per_item = plan.combiners_per_item;
    arguments.warps_per_row_log2 = plan.warps_per_row_log2;
    arguments.max_fixed_splits_log2 = plan.max_fixed_splits_log2;
    arguments.max_visible_blocks = plan.max_visible_blocks;
    arguments.policy = plan.policy;
    arguments.blocks_per_split = FastDivide::by(plan.blocks_per_split);
    arguments.length_first = plan.length_first;
    arguments.beside = beside;
    arguments.waits_for_new = beside == Beside::nothing && waits_for_new_alone(params);
    arguments.waits_first = beside == Beside::nothing && !arguments.waits_for_new;
    arguments.first_that_waits =
        beside == Beside::prefix ? first_that_waits(plan, Long::kBlockBytes) : UINT32_MAX;
    arguments.serves_a_part = params.cu_seqlens_q && params.most_queries > 0;
    arguments.partial =
        partial_workspace(params.device.index, stream, plan.workspace_words(),
                          beside == Beside::nothing ? WorkspaceUser::kernel : WorkspaceUser::beside);
    arguments.partial_words = plan.partial_words;

    const bool is_short = plan.items == SplitKvItems::short_items;
    // A launch beside numbers has to end behind them, which plain instances do not.
    const bool plain = is_plain(params) && beside != Beside::numbers;
    const int64_t rows = int64_t{params.seqlen_q} * params.group_size();
    auto run = split_kv_launcher<T, Long>(plain, rows);
    if (params.chosen_pages) {
        run = launch_split_kv_kernel<T, FixedItems<kHeadDim, kRowTiles, 2, kCodes>, SplitKvCalls::chosen>;
    } else if (plan.policy == SplitPolicy::fixed) {
        run =
            is_short
                ? launch_split_kv_kernel<T, FixedItems<kHeadDim, kRowTiles, 2, kCodes>, SplitKvCalls::fixed>
                : launch_split_kv_kernel<T, FixedItems<kHeadDim, kRowTiles, 1, kCodes>, SplitKvCalls::fixed>;
    } else if (plan.policy == SplitPolicy::by_length) {
        run = split_kv_launcher<T, ByLength<kHeadDim, kRowTiles, kCodes>>(plain, rows);
    } else if (plan.items == SplitKvItems::many_items) {
        run = split_kv_launcher<T, Many>(plain, rows);
    } else if (is_short) {
        run = split_kv_launcher<T, ShortOrMany>(plain, rows);
    }
    run(params, plan, arguments, stream);
}

template <class T, class Config, bool kPlain>
void launch_stream_k_kernel(const AttentionParams& params, const StreamKPlan& plan,
                            const StreamKLaunch& arguments, cudaStream_t stream) {
    constexpr size_t kSharedBytes = sizeof(StreamKShared<Config>);
    static_assert(kSharedBytes <= kDecodeSharedBytes);
    static_assert(Config::kStages >= 2, "a block is copied while another is multiplied");
    const LaunchShape shape{dim3(plan.num_ctas), Config::kThreads, true};
    launch<stream_k_decode_kernel<T, Config, kPlain>, kSharedBytes>(params.op, params.device.index, stream,
                                                                    shape, params, arguments);
}

template <class T, int kHeadDim, int kRowTiles, Codes kCodes>
void launch_stream_k_decode(const AttentionParams& params, const StreamKPlan& plan, cudaStream_t stream) {
    using Config = StreamKConfig<kHeadDim, kRowTiles, kCodes>;
    StreamKLaunch arguments{};
    arguments.group_size = FastDivide::by(params.group_size());
    arguments.pages = PageLayout::of(params, Config::kBlockKeys);
    arguments.waits_for_new = waits_for_new_alone(params);
    arguments.codes = CodeLayout::of(params, kHeadDim, plan.group_parts, one_scale(params));
    arguments.partial = partial_workspace(params.device.index, stream, plan.workspace_words());
    arguments.partial_words = plan.partial_words;
    auto run = launch_stream_k_kernel<T, Config, false>;
    if constexpr (has_plain_calls(kHeadDim, kCodes) && has_four_rows(kRowTiles, kCodes)) {
        using OfFourRows = typename Config::OfFourRows;
        if (is_plain(params) && params.seqlen_q * params.group_size() <= OfFourRows::kRows)
            run = launch_stream_k_kernel<T, OfFourRows, true>;
    }
    run(params, plan, arguments, stream);
}

}  // namespace octavo::cuda
