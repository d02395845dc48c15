// One instance of the decode kernel that deals blocks out, launched.
#pragma once

#include "cuda/decode/split_kv.cuh"
#include "cuda/runtime.h"
#include "cuda/workspace.h"

#include <algorithm>
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

// What the parts of items take: mergers, of rows that so many of their warps share.
template <class Config>
void plan_mergers(SplitKvLaunch& plan, int32_t num_rows) {
    plan.warps_per_row_log2 = plan.num_mergers = 0;
    if (plan.num_parts == 1) return;
    // A lane has up to eight parts.
    while (1 << plan.warps_per_row_log2 < Config::kWarps && 8 << plan.warps_per_row_log2 < plan.num_parts) {
        ++plan.warps_per_row_log2;
    }
    const int32_t rows_per_merger = Config::kWarps >> plan.warps_per_row_log2;
    plan.num_mergers = (num_rows + rows_per_merger - 1) / rows_per_merger;
}

// Cuts items into `most` parts or as many as `slots` CTAs a KV head allow, mergers left out.
template <class Config, SplitPolicy kPolicy>
void plan_parts(SplitKvLaunch& plan, const AttentionParams& params, int32_t slots, int32_t most) {
    plan.num_slots = std::max(slots, params.batch);
    const int32_t parts =
        kPolicy == SplitPolicy::by_length ? plan.num_slots - params.batch + 1 : slots / params.batch;
    plan.num_parts = std::max(std::min(parts, most), 1);
    plan.num_slots = std::min(plan.num_slots, params.batch * plan.num_parts);
    plan_mergers<Config>(plan, params.seqlen_q * params.group_size());
}

// As many parts as SMs allow; of what is soon read, as three SMs in seven do, so that the next launch starts
// on others meanwhile. (One sequence of 4096 keys, 8 heads: 7.6 us on 56 CTAs of 132, 9.1 on 64, 8.0 on 136.)
template <class Config, SplitPolicy kPolicy>
void plan_parts(SplitKvLaunch& plan, const AttentionParams& params) {
    constexpr int64_t kSoonRead = 384 * 1024;  // bytes, by a CTA
    const int32_t sms = num_sms(params.device.index), heads = params.num_kv_heads, few = sms * 3 / 7;
    const int32_t blocks = (params.seqlen_k - 1) / kBlockKeys + 1;
    // More than 32 parts cost as much merging as they save, up to twice as many keys.
    int32_t most = Config::parts_of(blocks);
    if (most > 32) most = std::max(32, most / 2);
    auto fits = [&] {
        const int32_t ctas = heads * (plan.num_slots + params.batch * plan.num_mergers);
        return plan.num_parts == 1 || ctas <= few;
    };
    int32_t slots = sms / heads;
    plan_parts<Config, kPolicy>(plan, params, slots, most);
    if (fits()) return;
    const SplitKvLaunch all = plan;
    for (slots = sms / 2 / heads; slots > 0; --slots) {
        plan_parts<Config, kPolicy>(plan, params, slots, most);
        if (fits()) break;
    }
    const int64_t bytes = int64_t{params.batch} * heads * blocks * 16 * Config::kBlockChunks;
    if (slots == 0 || bytes > kSoonRead * heads * plan.num_slots) plan = all;
}

template <class T, class Config, SplitPolicy kPolicy>
void launch_split_kv_kernel(const AttentionParams& params, SplitKvLaunch plan, cudaStream_t stream) {
    constexpr size_t kSharedBytes = sizeof(SplitKvShared<Config>);
    static_assert(kSharedBytes <= 227 * 1024);
    const auto kernel = split_kv_decode_kernel<T, Config, kPolicy>;
    static PerDevice<bool> has_dependent_launch_on;
    const bool dependent = has_dependent_launch_on.get(params.device.index, [&](int32_t) {
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
              "cudaFuncSetAttribute");
        return has_dependent_launch(kernel);
    });

    const uint32_t heads = params.num_kv_heads, batch = params.batch;
    const bool by_length = kPolicy == SplitPolicy::by_length;
    if (plan.num_parts > 1) {
        plan.part_words = params.seqlen_q * params.group_size() * Config::kPartialRow;
        const size_t words = size_t{heads} * plan.num_slots * plan.part_words;
        plan.pushed = persistent_workspace(params.device.index, stream, 0, words).counters;
    }

    cudaLaunchAttribute attribute = dependent_launch();
    cudaLaunchConfig_t config{};
    config.gridDim = by_length ? dim3(heads, plan.num_slots + batch * plan.num_mergers)
                               : dim3(heads, batch, plan.num_parts + plan.num_mergers);
    config.blockDim = dim3(Config::kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = dependent ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, params, plan), params.op);
}

template <class T, int kHeadDim, int kRowTiles, SplitPolicy kPolicy>
void launch_split_kv_decode(const AttentionParams& params, cudaStream_t stream) {
    SplitKvLaunch plan{};
    plan.group_size = FastDivide::by(params.group_size());
    plan.page_size = FastDivide::by(params.page_size);
    // Where the table has room for more keys than are served, these may end within a page.
    plan.max_pages = (params.seqlen_k - 1) / params.page_size + 1;
    plan.pages_per_block_log2 = pages_per_block_log2(params.page_size);
    using Config = SplitKvConfig<kHeadDim, kRowTiles, 1>;
    const bool is_short = params.seqlen_k <= Config::kShortKeys;
    if constexpr (kPolicy == SplitPolicy::by_length) {
        using ByLength = ByLengthConfig<kHeadDim, kRowTiles>;
        plan_parts<ByLength, kPolicy>(plan, params);
        launch_split_kv_kernel<T, ByLength, kPolicy>(params, plan, stream);
    } else if constexpr (kPolicy == SplitPolicy::even) {
        using Many = ManyConfig<kHeadDim, kRowTiles>;
        using Short =
            std::conditional_t<Many::kWarps == Config::kWarps, Many, ShortConfig<kHeadDim, kRowTiles>>;
        plan_parts<Config, kPolicy>(plan, params);
        const int64_t items = int64_t{params.batch} * params.num_kv_heads;
        if (plan.num_parts == 1 && items > 2 * num_sms(params.device.index)) {
            launch_split_kv_kernel<T, Many, kPolicy>(params, plan, stream);
        } else if (plan.num_parts == 1 && is_short) {
            launch_split_kv_kernel<T, Short, kPolicy>(params, plan, stream);
        } else {
            launch_split_kv_kernel<T, Config, kPolicy>(params, plan, stream);
        }
    } else {
        const Units<Config> units(params.num_kv_heads);
        plan.max_units_log2 = units.log2();
        plan.num_parts = units.most((params.seqlen_k - 1) / kBlockKeys + 1);
        plan.num_slots = params.batch * plan.num_parts;
        plan_mergers<Config>(plan, params.seqlen_q * params.group_size());
        const int64_t ctas = int64_t{params.num_kv_heads} * plan.num_slots,
                      sms = num_sms(params.device.index);
        plan.many_units = plan.num_parts > 1 && ctas > 4 * sms;
        // Two CTAs an SM where some start while others end.
        if (ctas > sms || (plan.num_parts == 1 && is_short)) {
            launch_split_kv_kernel<T, ShortConfig<kHeadDim, kRowTiles>, kPolicy>(params, plan, stream);
        } else {
            launch_split_kv_kernel<T, Config, kPolicy>(params, plan, stream);
        }
    }
}

}  // namespace octavo::cuda
