// Split-KV paged attention for few rows a KV head: one query token a sequence, or a handful (sm_80 and
// newer). One launch: work is planned on the device, and the last CTA to finish an item merges its pieces.
//
// grid: one CTA an SM. Each warp owns a run of blocks of 16 keys (schedule.cuh) with a queue of its own
// (block.cuh), softmax state and accumulators (item.cuh): no barrier until the merge (merge.cuh).
//
// Each step stands in one place of the loop and divisions are few on purpose: on small problems a launch
// spends its time fetching instructions (docs/kernels/decode.md).
#pragma once

#include "cuda/decode/merge.cuh"

namespace octavo::cuda {

template <class T, int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(DecodeConfig<kHeadDim, kRowTiles>::kThreads, 1)
    decode_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ DecodePlan plan) {
    using Config = DecodeConfig<kHeadDim, kRowTiles>;
    constexpr int kStages = Config::kStages;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<DecodeShared<Config>*>(shared_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const Schedule<Config::kThreads> schedule(p, shared.schedule);
    const int32_t total = schedule.total();
    const int32_t num_ctas =
        min(static_cast<int32_t>(gridDim.x), (total + plan.min_blocks - 1) / plan.min_blocks);
    const int32_t cta = blockIdx.x;
    if (cta >= num_ctas) return;
    const CtaRuns<Config::kSnapBlocks> runs(total, num_ctas);
    // Lane 0 finds where this CTA's run begins, lane 1 where it ends.
    int32_t boundary = runs.shares.begin(min(cta + min(lane, 1), num_ctas));
    if (boundary > 0 && boundary < total) boundary = runs.snap(boundary, schedule.find(boundary));
    const int32_t cta_begin = __shfl_sync(~0u, boundary, 0), cta_end = __shfl_sync(~0u, boundary, 1);
    const int32_t cta_blocks = cta_end - cta_begin;
    const int32_t begin = cta_begin + cta_blocks * warp / Config::kWarps;
    const int32_t end = cta_begin + cta_blocks * (warp + 1) / Config::kWarps;

    bool left_first = false, left_last = false;
    if (begin < end) {
        uint4* const queue = shared.queue[warp].blocks;
        const uint64_t policy = ptx::evict_first_policy();
        const Item first_item = schedule.find(begin);
        Item item = first_item, copied_item = first_item;
        KeyTiles copied_tiles(Visibility{}, 0, 0, kBlockKeys);
        BlockKeys keys{};
        ItemState<T, Config> state(p, plan.group_size);
        int32_t item_from = begin;  // where this warp's part of the item starts
        int32_t stage = 0;

        // Copies run kStages blocks ahead of the products, and look-ups of pages one block ahead of the
        // copies.
#pragma unroll 1
        for (int32_t block = begin - kStages - 1; block < end; ++block) {
            if (block >= begin) {
                ptx::cp_async_wait<kStages - 1>();
                __syncwarp();  // every lane's copies have arrived
                state.add(Block<Config>(queue, stage), block - item.begin);
                __syncwarp();  // every lane is done with the block
            }
            if (block >= begin - kStages) {
                if (block + kStages < end) Block<Config>(queue, stage).template copy<T>(p, keys, policy);
                ptx::cp_async_commit();  // a group a block, empty past the end
                stage = stage + 1 == kStages ? 0 : stage + 1;
            }
            const int32_t next = block + kStages + 1;
            if (next < end) {
                if (next == begin || next == copied_item.end) {
                    if (next != begin) copied_item = schedule.next(copied_item);
                    copied_tiles = key_blocks(SequenceSlice::make(p, copied_item.sequence));
                }
                keys =
                    BlockKeys::find(p, plan.page_size, copied_item, copied_tiles, next - copied_item.begin);
            }

            const bool run_ends = block + 1 == end, item_ends = block + 1 == item.end;
            if (block >= begin && (run_ends || item_ends)) {
                if (item_ends && item_from == item.begin) {
                    state.store();
                } else {
                    // A run's last piece goes where its blocks have been: the last copy has arrived.
                    const bool is_first = item_from == begin;
                    state.leave(is_first ? shared.first[warp] : shared.queue[warp].last);
                    (is_first ? left_first : left_last) = true;
                }
                if (run_ends) break;
                item = schedule.next(item);
                item_from = block + 1;
            }
            if (block + 1 == item_from) state.begin(item);
        }
    }
    if (lane == 0 && !left_first) shared.first[warp].item.begin = -1;
    if (lane == 0 && !left_last) shared.queue[warp].last.item.begin = -1;
    __syncthreads();  // all pieces are there
    Merge<T, Config, Config::kSnapBlocks>(p, plan, runs, cta_begin, cta_end, shared)();
}

}  // namespace octavo::cuda
