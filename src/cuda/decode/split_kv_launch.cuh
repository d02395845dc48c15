// The instances of the split-KV kernel of one row of kDecodeTiles and one policy, launched.
#pragma once

#include "cuda/decode/fixed_splits.h"
#include "cuda/decode/plan.h"
#include "cuda/decode/split_kv.cuh"
#include "cuda/launch.cuh"
#include "cuda/workspace.h"

#include <type_traits>

namespace octavo::cuda {

// How many pages a block of keys may touch, as a power of two.
inline int32_t pages_per_block_log2(int32_t page_size) {
    int32_t pages = (kBlockKeys - 2) / page_size + 2;  // wherever the block begins
    if (page_size % kBlockKeys == 0) pages = 1;
    if (kBlockKeys % page_size == 0) pages = kBlockKeys / page_size;
    int32_t log2 = 0;
    while (1 << log2 < pages) ++log2;
    return log2;
}

template <class T, class Config, SplitPolicy kPolicy>
void launch_split_kv_kernel(const AttentionParams& params, const SplitKvPlan& plan,
                            const SplitKvLaunch& arguments, cudaStream_t stream) {
    constexpr size_t kSharedBytes = sizeof(SplitKvShared<Config>);
    static_assert(kSharedBytes <= kDecodeSharedBytes);
    static_assert(FixedSplits<Config>::kShortBlocks == Units<Config>::kShort &&
                  FixedSplits<Config>::kLongBlocks == Units<Config>::kLeast);
    const Grid grid = plan.grid();
    const LaunchShape shape{dim3(grid.x, grid.y, grid.z), Config::kThreads, true};
    launch<split_kv_decode_kernel<T, Config, kPolicy>, kSharedBytes>(params.op, params.device.index, stream,
                                                                     shape, params, arguments);
}

template <class T, int kHeadDim, int kRowTiles, SplitPolicy kPolicy>
void launch_split_kv_decode(const AttentionParams& params, const SplitKvPlan& plan, cudaStream_t stream) {
    SplitKvLaunch arguments{};
    arguments.group_size = FastDivide::by(params.group_size());
    arguments.page_size = FastDivide::by(params.page_size);
    // Where the table has room for more keys than are served, these may end within a page.
    arguments.max_pages = (params.seqlen_k - 1) / params.page_size + 1;
    arguments.pages_per_block_log2 = pages_per_block_log2(params.page_size);
    arguments.num_parts = plan.num_splits;
    arguments.num_slots = plan.num_slots;
    arguments.num_mergers = plan.combiners_per_item;
    arguments.warps_per_row_log2 = plan.warps_per_row_log2;
    arguments.max_units_log2 = plan.max_fixed_splits_log2;
    arguments.many_units = plan.length_first;
    arguments.part_words = plan.partial_words;
    if (plan.num_splits > 1) {
        arguments.pushed =
            persistent_workspace(params.device.index, stream, 0, plan.workspace_words()).counters;
    }

    using Long = SplitKvConfig<kHeadDim, kRowTiles, 1>;
    using Short = ShortConfig<kHeadDim, kRowTiles>;
    using Many = ManyConfig<kHeadDim, kRowTiles>;
    if constexpr (kPolicy == SplitPolicy::by_length) {
        using ByLength = ByLengthConfig<kHeadDim, kRowTiles>;
        launch_split_kv_kernel<T, ByLength, kPolicy>(params, plan, arguments, stream);
    } else if constexpr (kPolicy == SplitPolicy::even) {
        using ShortOrMany = std::conditional_t<has_short_items<kHeadDim, kRowTiles>(), Short, Many>;
        const auto run = plan.items == SplitKvItems::many_items ? launch_split_kv_kernel<T, Many, kPolicy>
                         : plan.items == SplitKvItems::short_items
                             ? launch_split_kv_kernel<T, ShortOrMany, kPolicy>
                             : launch_split_kv_kernel<T, Long, kPolicy>;
        run(params, plan, arguments, stream);
    } else {
        const auto run = plan.items == SplitKvItems::short_items ? launch_split_kv_kernel<T, Short, kPolicy>
                                                                 : launch_split_kv_kernel<T, Long, kPolicy>;
        run(params, plan, arguments, stream);
    }
}

}  // namespace octavo::cuda
