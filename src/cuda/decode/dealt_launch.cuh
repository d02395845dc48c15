// One instance of the decode kernel that deals blocks out, launched.
#pragma once

#include "cuda/decode/dealt.cuh"
#include "cuda/runtime.h"
#include "cuda/workspace.h"

#include <algorithm>

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

template <class T, int kHeadDim, int kRowTiles, int kCtas, bool kBatchInvariant>
void launch_dealt_kernel(const ForwardParams& params, DealtPlan plan, cudaStream_t stream) {
    using Config = DealtConfig<kHeadDim, kRowTiles, kCtas>;
    constexpr size_t kSharedBytes = sizeof(DealtShared<Config>);
    static_assert(kSharedBytes <= 227 * 1024);
    const auto kernel = dealt_decode_kernel<T, kHeadDim, kRowTiles, kCtas, kBatchInvariant>;
    static PerDevice<bool> has_dependent_launch_on;
    const bool dependent = has_dependent_launch_on.get(params.device.index, [&](int32_t) {
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
              "cudaFuncSetAttribute");
        return has_dependent_launch(kernel);
    });

    // A lane of the mergers has up to eight parts.
    while (1 << plan.warps_per_row_log2 < Config::kWarps && 8 << plan.warps_per_row_log2 < plan.num_parts) {
        ++plan.warps_per_row_log2;
    }
    const int32_t rows_per_merger = Config::kWarps >> plan.warps_per_row_log2;
    const int32_t num_rows = params.seqlen_q * params.group_size();
    int32_t num_mergers = 0;
    if (plan.num_parts > 1) {
        num_mergers = (num_rows + rows_per_merger - 1) / rows_per_merger;
        const size_t items = size_t{1} * params.batch * params.num_kv_heads;
        plan.pushed = kept_workspace(params.device.index, stream, 0,
                                     items * plan.num_parts * Config::kRows * Config::kPushedRow)
                          .counters;
    }

    cudaLaunchAttribute attribute = dependent_launch();
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(params.num_kv_heads, params.batch, plan.num_parts + num_mergers);
    config.blockDim = dim3(Config::kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = dependent ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, params, plan), params.op);
}

template <class T, int kHeadDim, int kRowTiles, bool kBatchInvariant>
void launch_dealt_decode(const ForwardParams& params, cudaStream_t stream) {
    using Config = DealtConfig<kHeadDim, kRowTiles, 1>;
    DealtPlan plan{};
    plan.group_size = FastDivide::by(params.group_size());
    plan.page_size = FastDivide::by(params.page_size);
    // Where the table has room for more keys than are served, these may end within a page.
    plan.max_pages = (params.seqlen_k - 1) / params.page_size + 1;
    plan.pages_per_block_log2 = pages_per_block_log2(params.page_size);
    const int32_t blocks = (params.seqlen_k - 1) / kBlockKeys + 1;
    if (kBatchInvariant) {
        const Units<Config> units(params.num_kv_heads);
        plan.max_units_log2 = units.log2();
        plan.num_parts = units.most(blocks);
    } else {
        // More than 32 parts cost as much merging as they save, up to twice as many keys.
        const int32_t items = params.batch * params.num_kv_heads, parts = blocks / Config::kMinBlocks;
        plan.num_parts = std::max(
            1, std::min(num_sms(params.device.index) / items, parts <= 32 ? parts : std::max(32, parts / 2)));
    }
    if (plan.num_parts == 1 && params.seqlen_k <= Config::kShortKeys) {
        launch_dealt_kernel<T, kHeadDim, kRowTiles, 2, kBatchInvariant>(params, plan, stream);
    } else {
        launch_dealt_kernel<T, kHeadDim, kRowTiles, 1, kBatchInvariant>(params, plan, stream);
    }
}

}  // namespace octavo::cuda
