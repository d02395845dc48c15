// Copies a warp's blocks, item after item, from the pages to shared memory, in the stream-K kernel.
#pragma once

#include "cuda/decode/page_ids.cuh"
#include "cuda/decode/stream_k_schedule.cuh"

namespace octavo::cuda {

// The places of a warp's blocks and queries in shared memory: rings of kStages.
template <class Config>
class WarpRings {
  public:
    // `blocks`: behind the blocks lie, for codes, their scales.
    __device__ WarpRings(const void* blocks, const void* queries)
        : blocks_(ptx::shared_address(blocks)), queries_(ptx::shared_address(queries)) {
        pin_in_register(blocks_);
        pin_in_register(queries_);
    }
    __device__ KeyRows<Config> k(int stage) const { return {blocks_ + stage * Config::kBlockBytes}; }
    __device__ ValueRows<Config> v(int stage) const {
        return {k(stage).address + 16 * Config::kBlockKeys * Config::kKeyChunks};
    }
    __device__ uint32_t scales(int stage) const {
        return blocks_ + Config::kStages * Config::kBlockBytes + stage * 16 * Config::kScaleChunks;
    }
    __device__ QueryRows<Config> queries(int stage) const {
        return {queries_ + stage * 16 * Config::kQueryChunks};
    }
    __device__ static int next(int stage) { return stage + 1 == Config::kStages ? 0 : stage + 1; }

  private:
    uint32_t blocks_, queries_;
};

// Copies the blocks of a warp, which follow each other in the order of all blocks, and the queries of their
// items.
template <class T, class Config>
class StreamKCopier {
  public:
    using Batch = Schedule<Config>;

    // `visible`: two places in shared memory that belong to the warp.
    __device__ StreamKCopier(const AttentionParams& p, const StreamKLaunch& launch,
                             const BlockCopier<T, Config>& rows, VisibleBlocks* visible)
        : p_(p), launch_(launch), rows_(rows), page_ids_(p, launch.pages, rows), visible_(visible) {}

    // Sets the warp's blocks to [begin, end); `item` holds the first of them.
    __device__ void start(const Batch& schedule, const Item& item, int32_t begin, int32_t end) {
        schedule_ = &schedule;
        end_ = end;
        ask_for(item, begin);
        enter();
    }

    // Starts the copies of block `block`, the next one. Returns whether it is the first of its item here.
    __device__ bool copy(KeyRows<Config> k, ValueRows<Config> v, uint32_t scales, int32_t block) {
        const bool enters = block == item_.end;
        if (enters) enter();
        if (keys_.begin >= keys_.end) return enters;
        const VisibleBlocks& visible = visible_[which_];
        int32_t place = block - item_.begin;
        if (OCTAVO_RARE(p_.window_left >= 0)) place = visible.place(place);
        if (place >= first_new_) ptx::wait_for_previous_grid();
        const auto lies = page_ids_.next(place, keys_, visible, [&](int32_t from) {
            const int32_t last = min(item_.end, end_) - item_.begin - 1;
            if (from <= (OCTAVO_RARE(p_.window_left >= 0) ? visible.place(last) : last)) {
                page_ids_.ask_from(from, visible);
            } else if (item_.end < end_) {
                ask_for(schedule_->next(item_), item_.end);
            }
        });
        rows_.copy(k, v, scales, lies);
        return enters;
    }

    // The item whose blocks are being copied.
    __device__ const Item& item() const { return item_; }
    __device__ void copy_queries(QueryRows<Config> q, const Item& item) const {
        rows_.copy_queries(q, schedule_->slice(item.sequence), launch_.group_size, item.sequence,
                           item.kv_head);
    }

  private:
    // Starts loading the first page ids of an item, from block `begin` on.
    __device__ void ask_for(const Item& item, int32_t begin) {
        next_item_ = item;
        VisibleBlocks& visible = visible_[which_ ^ 1];
        int32_t first = begin - item.begin;
        if (OCTAVO_RARE(p_.window_left >= 0)) {
            const VisibleBlocks blocks =
                VisibleBlocks::of<Config::kBlockKeys>(schedule_->slice(item.sequence));
            first = blocks.place(first);
            __syncwarp();
            if (threadIdx.x % 32 == 0) visible = blocks;
            __syncwarp();
        }
        page_ids_.start(item.sequence, first, 1, visible);
        page_ids_.ask();
    }
    __device__ void enter() {
        // An item without keys has not asked for the next item.
        if (item_.end != next_item_.begin && item_.end >= 0) ask_for(schedule_->next(item_), item_.end);
        item_ = next_item_;
        which_ ^= 1;
        const SequenceSlice seq = schedule_->slice(item_.sequence);
        keys_ = {0, seq.see.seqlen_k};
        if (launch_.waits_for_new) first_new_ = (keys_.end - seq.seqlen_q) / Config::kBlockKeys;
        if (OCTAVO_RARE(p_.window_left >= 0)) keys_ = visible_[which_].keys(keys_.end);
        page_ids_.enter(item_.kv_head);
    }

    const AttentionParams& p_;
    const StreamKLaunch& launch_;
    const BlockCopier<T, Config>& rows_;
    PageIds<T, Config, true> page_ids_;
    VisibleBlocks* visible_;
    int which_ = 0;  // which of the two belongs to the current item
    const Batch* schedule_ = nullptr;
    Item item_{0, 0, 0, -1}, next_item_{};
    KeyRange keys_{0, 0};  // keys of the item that some query sees
    // The item's first block with keys that earlier kernels may still write (static_past).
    int32_t first_new_ = INT32_MAX;
    int32_t end_ = 0;
};

}  // namespace octavo::cuda
