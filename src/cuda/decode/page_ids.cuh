// Which pages a warp's blocks lie in.
#pragma once

#include "cuda/decode/code_copy.cuh"
#include "cuda/decode/copy.cuh"
#include "cuda/decode/parameters.h"
#include "cuda/decode/visible_blocks.cuh"
#include "cuda/ptx/relaxed.h"

namespace octavo::cuda {

// Some blocks of an item, in their order: every `stride`-th one from `first` up to `end`.
struct WarpBlocks {
    int32_t first, end, stride;
};

// Finds where the rows of a warp's blocks lie. Page ids are held 32 at a time, one in each lane; the next 32
// are loaded when these come into use, so that they do not wait behind the copies that they are for. kGaps:
// whether a window may hide blocks between those of a prefix and its own (PageLayout::has_gap); then the
// item's VisibleBlocks are looked at. kChosen: pages are counted in a list of columns of the page table.
template <class T, class Config, bool kGaps, bool kChosen = false>
class PageIds {
  public:
    using Place = typename BlockCopier<T, Config>::Place;

    __device__ PageIds(const AttentionParams& p, const PageLayout& pages, const BlockCopier<T, Config>& rows)
        : p_(p), pages_(pages), rows_(rows) {}

    // Sets the list. Call it before start().
    __device__ void choose(const IndexArray& list) { list_ = list; }
    // Finds where the first page ids are, for blocks `stride` apart from `first` on. Call it before ask().
    __device__ void start(int32_t sequence, int32_t first, int32_t stride, const VisibleBlocks& visible) {
        table_ = p_.page_table.at(sequence * p_.page_table_stride);
        stride_ = stride;
        asked_ = first;
        first_entry_ = entry(first, visible);
        pin_in_register(first_entry_);
    }
    // Starts loading them. The length may still be unknown: entries past the last page are not used.
    __device__ void ask() { asked_ids_ = id_at(ptx::load_relaxed(first_entry_)); }
    // From the next block on, the page ids that were asked for are in use, for this KV head.
    __device__ void enter(int32_t kv_head) {
        index_ = 32;
        head_offset_ = rows_.head_offset(kv_head);
        pin_in_register(head_offset_);
    }

    // Returns where `block`, the next one, lies, as BlockCopier takes it. Keys outside of `keys` are replaced
    // by others, since only pages of keys that some query sees need to exist. When the next page ids come
    // into use, this calls ask_for_more(first), which has to ask for those that follow by ask_from().
    template <class AskForMore>
    __device__ Place next(int32_t block, const KeyRange& keys, const VisibleBlocks& visible,
                          AskForMore ask_for_more) {
        if (index_ == 32) {
            ids_ = asked_ids_;
            index_ = 0;
            asked_ += (32 >> pages_.pages_per_block_log2) * stride_;
            if (kGaps && OCTAVO_RARE(pages_.has_gap)) asked_ = visible.past_gap(block, asked_);
            ask_for_more(asked_);
        }
        const Place place = place_of(block, keys, visible);
        index_ += 1 << pages_.pages_per_block_log2;
        return place;
    }
    __device__ void ask_from(int32_t block, const VisibleBlocks& visible) {
        asked_ids_ = id_at(*entry(block, visible));
    }

  private:
    // Where this lane finds its page id. Together, the lanes hold the page ids of 32 >> log2 blocks from
    // `first` on, 1 << log2 pages each.
    __device__ const int32_t* entry(int32_t first, const VisibleBlocks& visible) const {
        const int lane = threadIdx.x % 32, log2 = pages_.pages_per_block_log2;
        int32_t block = first + (lane >> log2) * stride_;
        if (kGaps && OCTAVO_RARE(pages_.has_gap)) block = visible.past_gap(first, block);
        block = min(block, (p_.seqlen_k - 1) / Config::kBlockKeys);
        const int32_t page =
            pages_.page_size.quotient(block * Config::kBlockKeys) + (lane & ((1 << log2) - 1));
        if constexpr (kChosen) return list_.at(min(page, p_.chosen_pages.num_chosen - 1));
        return IndexArray{table_, p_.page_table.stride_bytes}.at(min(page, pages_.max_pages - 1));
    }
    // The page id for an entry that was loaded. The entry of a list is a column, whose page id is looked up;
    // behind a list's end, any column serves.
    __device__ uint32_t id_at(int32_t entry) const {
        if constexpr (!kChosen) return entry;
        const int32_t column = min(max(entry, 0), pages_.max_pages - 1);
        return IndexArray{table_, p_.page_table.stride_bytes}[column];
    }

    __device__ Place place_of(int32_t block, const KeyRange& keys, const VisibleBlocks& visible) const {
        const int32_t first_key = block * Config::kBlockKeys;
        int32_t key = min(first_key + static_cast<int32_t>(threadIdx.x % Config::kBlockKeys), keys.end - 1);
        key = max(key, keys.begin);
        if (kGaps && OCTAVO_RARE(pages_.has_gap)) key = visible.visible_key(key, block);
        const int32_t page = pages_.page_size.quotient(key);
        const uint32_t id = __shfl_sync(~0u, ids_, index_ + page - pages_.page_size.quotient(first_key));
        const bool is_whole = first_key >= keys.begin && first_key + Config::kBlockKeys <= keys.end &&
                              !(kGaps && pages_.has_gap);
        return rows_.place(id, key - page * p_.page_size, head_offset_, is_whole);
    }

    const AttentionParams& p_;
    const PageLayout& pages_;
    const BlockCopier<T, Config>& rows_;
    const int32_t *table_, *first_entry_;
    IndexArray list_;
    uint32_t head_offset_;
    int32_t stride_, asked_;  // asked_: lane 0 of asked_ids_ has this block's first page
    int index_ = 32;          // the lane that holds the first page of the next block
    uint32_t ids_ = 0, asked_ids_ = 0;
};

}  // namespace octavo::cuda
