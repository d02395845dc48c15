// Stream-K paged attention for few rows per KV head, where only the device knows how long sequences are: a
// batch of any lengths. There is one launch, in which every CTA finds its share of all blocks by itself.
// Page: docs/kernels/decode.md.
//
// grid: one CTA per SM. A CTA owns a run of blocks of keys (stream_k_ranges.cuh), and each of its warps a
// part that costs as much as the others, wherever items end. Warps have queues of their own: there is no
// barrier until partial results are combined (stream_k_combine.cuh).
//
//     items     |------- 0 -------|--- 1 ---|-------------- 2 --------------|- 3 -|
//     CTAs      |      0      |      1      |      2      |      3      |     4     |
//
// On purpose, each step is written once in the loop and there are few divisions: small problems run most of
// this code once, at some five clocks per instruction.
#pragma once

#include "cuda/decode/plain_calls.h"
#include "cuda/decode/prefetch.cuh"
#include "cuda/decode/stream_k_combine.cuh"
#include "cuda/ptx/grid_dependency.h"

namespace octavo::cuda {

template <class T, class Config, bool kPlain>
__global__ void __launch_bounds__(Config::kThreads, 1)
    stream_k_decode_kernel(const __grid_constant__ AttentionParams params,
                           const __grid_constant__ StreamKLaunch launch) {
    using Batch = Schedule<Config>;
    constexpr int kStages = Config::kStages;
    extern __shared__ __align__(512) unsigned char stream_k_shared_bytes[];
    const KnownParams<kPlain> known(params);
    const AttentionParams& p = known.params;
    auto& shared = *reinterpret_cast<StreamKShared<Config>*>(stream_k_shared_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t cta = grid_index(launch.partial).x;

    prefetch_params<Config>(params);
    auto& own = shared.warps[warp];
    const WarpRings<Config> rings(own.blocks, own.queries);
    const BlockCopier<T, Config> rows(p, launch.codes);
    StreamKCopier<T, Config> copier(p, launch, rows, own.visible);

    ptx::launch_dependents();
    if (!launch.waits_for_new) ptx::wait_for_previous_grid();
    prefetch_page_table(p, launch.pages.page_size);
    const Batch schedule(p, shared.schedule);
    const StreamKRange<Config> range(schedule, cta);
    // Not all CTAs of a launch may end before earlier kernels do: what comes next waits for this launch
    // alone.
    if (range.begin == range.end) return ptx::wait_for_previous_grid();
    const auto [begin, end] = range.of_warp(schedule, warp);

    Item first{0, 0, -1, 0}, last{0, 0, -1, 0};
    if (begin < end) {
        Item item = begin < range.begin_item.end ? range.begin_item : schedule.find(begin);
        copier.start(schedule, item, begin, end);
        WarpAttention<T, Config, Batch> state(p, launch.group_size, launch.codes, schedule);
        int32_t item_from = begin;  // where this warp's part of the item starts
        VisibleBlocks visible{};    // the item's, in use where there is a window
        bool has_keys = false;
        int stage = 0, queries = -1, copied_queries = -1;

        // Block `next` is copied to the place of the block before the one that is being multiplied.
#pragma unroll 1
        for (int32_t next = begin; next < end + kStages - 1; ++next) {
            if (next < end) {
                const bool enters_item =
                    copier.copy(rings.k(stage), rings.v(stage), rings.scales(stage), next);
                if (enters_item || next == begin) {
                    copied_queries = rings.next(copied_queries);
                    const bool is_first = next == begin;
                    if (launch.waits_for_new && !is_first) ptx::wait_for_previous_grid();
                    if (!launch.waits_for_new || !is_first)
                        copier.copy_queries(rings.queries(copied_queries), copier.item());
                }
            }
            ptx::cp_async_commit();  // one group per block; past the end it is empty
            stage = rings.next(stage);
            const int32_t block = next - (kStages - 1);
            if (block < begin) continue;

            if (block == item_from) {
                queries = rings.next(queries);
                state.begin(item, rings.queries(queries));
                state.reset();
                const SequenceSlice seq = schedule.slice(item.sequence);
                has_keys = seq.see.seqlen_k > 0;
                if (OCTAVO_RARE(p.window_left >= 0)) {
                    visible = VisibleBlocks::of<Config::kBlockKeys>(seq);
                    has_keys = visible.count > 0;
                }
                // This is done while the first copies are in flight, by the warp with the last block.
                if (block == begin && end == range.end && lane == 0)
                    shared.first_cta = range.first_cta_of_begin_item();
                if (block == begin && launch.waits_for_new) {
                    ptx::wait_for_previous_grid();
                    copier.copy_queries(rings.queries(queries), item);
                    ptx::cp_async_commit();
                    ptx::cp_async_wait<0>();
                }
            }
            ptx::cp_async_wait<kStages - 1>();
            __syncwarp();  // every lane's copies have arrived
            if (Config::kHasCodes && block == item_from) state.load_queries();
            int32_t place = block - item.begin;
            if (OCTAVO_RARE(p.window_left >= 0)) place = visible.place(place);
            if (has_keys)
                state.add(rings.k(stage), rings.v(stage), rings.scales(stage), place * Config::kBlockKeys);
            __syncwarp();  // every lane is done with the block

            const bool range_ends = block + 1 == end, item_ends = block + 1 == item.end;
            if (!range_ends && !item_ends) continue;
            state.finish();
            if (item_ends && item_from == item.begin) {
                state.store();
            } else if (item_from == begin) {
                first = item;
                state.leave(own.first);
            } else {
                // The partial result takes the place of the blocks: the last copy has arrived.
                last = item;
                state.leave(own.last);
            }
            if (range_ends) break;
            item = schedule.next(item);
            item_from = block + 1;
        }
    }
    if (lane == 0) {
        shared.items[2 * warp] = first;
        shared.items[2 * warp + 1] = last;
    }
    __syncthreads();  // all partial results are there
    const OutputWriter<T, Batch> writer(p, launch.group_size, schedule);
    StreamKCombine<T, Config>(writer, launch, shared, cta).combine(range.begin, range.end);
}

}  // namespace octavo::cuda
