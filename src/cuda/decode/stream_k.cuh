// Split-KV paged attention for few rows a KV head: one query token a sequence, or a handful, where a CTA may
// have some 200 KB of shared memory. One launch: work is planned on the device, and the last CTA to finish an
// item merges its pieces.
//
// grid: one CTA an SM. Each warp owns a run of blocks of 16 keys (schedule.cuh) with a queue of its own
// (block.cuh), softmax state and accumulators (item.cuh): no barrier until the merge (merge.cuh).
//
// Each step stands in one place of the loop and divisions are few on purpose: small problems run most of this
// code once, at some five clocks an instruction (docs/kernels/decode.md).
#pragma once

#include "cuda/decode/merge.cuh"
#include "cuda/decode/parameters.cuh"
#include "cuda/ptx/grid_dependency.h"

namespace octavo::cuda {

template <class T, int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(StreamKConfig<kHeadDim, kRowTiles>::kThreads, 1)
    stream_k_decode_kernel(const __grid_constant__ AttentionParams p,
                           const __grid_constant__ StreamKLaunch plan) {
    using Config = StreamKConfig<kHeadDim, kRowTiles>;
    constexpr int kStages = Config::kStages;
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<StreamKShared<Config>*>(shared_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    prefetch_params(p);
    auto& own = shared.warps[warp];
    const WarpQueue<Config> queue(own);
    Copier<T, Config, RunWalk<Config::kThreads>> copier(p, plan.page_size, plan.group_size);

    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    prefetch_page_table(p, plan.page_size);
    const Schedule<Config::kThreads> schedule(p, shared.schedule);
    const CtaRun<Config> run(schedule, plan.pairs);
    const int32_t run_blocks = run.end - run.begin;
    if (run_blocks == 0) return;
    const int32_t begin = run.begin + run_blocks * warp / Config::kWarps;
    const int32_t end = run.begin + run_blocks * (warp + 1) / Config::kWarps;

    Item first{0, 0, -1, 0}, last{0, 0, -1, 0};
    if (begin < end) {
        Item item = begin < run.begin_item.end ? run.begin_item : schedule.find(begin);
        const RunWalk<Config::kThreads> walk(schedule, item, begin, end);
        copier.begin(schedule, walk);
        WarpAttention<T, Config> state(p, plan.group_size, schedule);
        int32_t item_from = begin;  // where this warp's part of the item starts
        int stage = 0, queries = -1, copied_queries = -1;

        // Block `next` is copied to the place of the block before the one that is multiplied.
#pragma unroll 1
        for (int32_t next = begin; next < end + kStages - 1; ++next) {
            if (next < end) {
                const bool new_item = next == copier.segment().end;
                if (new_item) copier.begin_next();
                copier.copy(queue.k(stage), queue.v(stage), next - copier.segment().item.begin);
                if (new_item || next == begin) {
                    copied_queries = queue.next(copied_queries);
                    copier.copy_queries(queue.queries(copied_queries));
                }
            }
            ptx::cp_async_commit();  // a group a block, empty past the end
            stage = queue.next(stage);
            const int32_t block = next - (kStages - 1);
            if (block < begin) continue;

            if (block == item_from) {
                queries = queue.next(queries);
                state.begin(item, queue.queries(queries));
                state.reset();
                // While the first copies are on their way. The last warp has blocks if any has.
                if (block == begin && warp == Config::kWarps - 1 && lane < 2)
                    shared.cut[lane] = run.cut(lane);
            }
            ptx::cp_async_wait<kStages - 1>();
            __syncwarp();  // every lane's copies have arrived
            state.add(queue.k(stage), queue.v(stage), block - item.begin);
            __syncwarp();  // every lane is done with the block

            const bool run_ends = block + 1 == end, item_ends = block + 1 == item.end;
            if (!run_ends && !item_ends) continue;
            state.sum_over_keys();
            if (item_ends && item_from == item.begin) {
                state.store();
            } else if (item_from == begin) {
                first = item;
                state.leave(own.first);
            } else {
                // Goes where the blocks have been: the last copy has arrived.
                last = item;
                state.leave(own.last);
            }
            if (run_ends) break;
            item = schedule.next(item);
            item_from = block + 1;
        }
    }
    const OutputWriter<T, Config> part_merge(p, plan.group_size, schedule);
    if (run.in_pair) return merge_pair(part_merge, shared, run.begin_item);
    if (lane == 0) {
        shared.items[2 * warp] = first;
        shared.items[2 * warp + 1] = last;
    }
    __syncthreads();  // all pieces are there
    RowMerge<T, Config>(part_merge, plan, shared)(run.begin, run.end);
}

}  // namespace octavo::cuda
