// The blocks of 16 keys that a warp works on, and their way from the pages to shared memory.
#pragma once

#include "cuda/decode/rows.cuh"
#include "cuda/decode/segments.cuh"

namespace octavo::cuda {

// Copies a warp's blocks, segment after segment as a walk (segments.cuh) names them, and the queries of their
// items to shared memory.
template <class T, class Config, class Walk>
class Copier {
  public:
    __device__ Copier(const AttentionParams& p, const FastDivide& page_size, const FastDivide& group_size)
        : p_(p), page_size_(page_size), group_size_(group_size), rows_(p) {}

    // Before the first copy; false if there is nothing to copy.
    __device__ bool begin(const Schedule<Config::kThreads>& schedule, const Walk& walk) {
        schedule_ = &schedule;
        walk_ = &walk;
        next_ = walk.first();
        if (!walk.settle(next_)) return false;
        ask_for_pages(walk.segment(next_), false);
        begin_segment();
        return true;
    }

    // The next segment, once this one's last block is copied; false if there is none.
    __device__ bool begin_next() {
        if (has_next_) begin_segment();
        return has_next_;
    }

    __device__ const Segment& segment() const { return segment_; }

    // Starts the copies of block `index` of the item. In the place of a row that no query sees, one that some
    // query sees; without any, nothing is copied.
    __device__ void copy(Rows<Config> k, Rows<Config> v, int32_t index) {
        const int lane = threadIdx.x % 32;
        const int32_t first_key = tiles_.start(index), key = first_key + lane % kBlockKeys;
        const uint32_t needed = __ballot_sync(~0u, tiles_.needed(key)) & 0xffff;
        const int32_t first_page = page_size_.quotient(first_key), page = page_size_.quotient(key);
        if (OCTAVO_RARE(first_page >= window_ + 64)) {  // past a gap between prefix and window
            next_window_ = first_page;
            next_ids_ = load_ids(segment_.item, first_page, num_pages(seq_));
            window_ = first_page - 32;
        }
        if (first_page >= window_ + 32) next_pages();
        if (needed != 0) copy_rows(k, v, key, page, needed);
        const bool is_last = index + 1 == segment_.end - segment_.item.begin;
        if (!asked_ && (window_ + 32 >= end_page_ || is_last)) ask_next_segment();
    }

    // The queries of the segment's item.
    __device__ void copy_queries(Rows<Config> q) const {
        const int32_t sequence = segment_.item.sequence;
        rows_.copy_queries(q, schedule_->slice(sequence), group_size_, sequence, segment_.item.kv_head);
    }

  private:
    __device__ void copy_rows(Rows<Config> k, Rows<Config> v, int32_t key, int32_t page, uint32_t needed) {
        const int lane = threadIdx.x % 32;
        // Lane l knows key l % 16, its row of K for the lower lanes and of V for the upper ones.
        uint32_t id = __shfl_sync(~0u, ids_, page - window_);
        if (OCTAVO_RARE(__any_sync(~0u, page >= window_ + 32 && (needed >> lane % 16 & 1)))) {
            const uint32_t next_id = __shfl_sync(~0u, next_ids_, page - window_);
            if (page >= window_ + 32) id = next_id;
        }
        const uint32_t offset = rows_.row_offset(id, key - page * p_.page_size, head_offset_);
        const bool own = needed >> lane % 16 & 1;
        rows_.copy(k, v, __shfl_sync(~0u, offset, own ? lane : (lane & 16) + 31 - __clz(needed)));
    }

    __device__ void begin_segment() {
        segment_ = walk_->segment(next_);
        asked_ = false;
        seq_ = schedule_->slice(segment_.item.sequence);
        tiles_ = key_blocks(seq_);
        end_page_ = end_page(seq_, tiles_, segment_);
        head_offset_ = rows_.head_offset(segment_.item.kv_head);
        window_ = next_window_ - 32;  // what was asked for comes into use with the first copy
    }

    // Page ids are held 32 at a time, a lane each, and the next 32 are asked for when these come into use:
    // the segment's next ones, or the next segment's first.
    __device__ void next_pages() {
        ids_ = next_ids_;
        window_ = next_window_;
        if (window_ + 32 < end_page_) {
            next_window_ = window_ + 32;
            next_ids_ = load_ids(segment_.item, next_window_, num_pages(seq_));
        }
    }
    // Once the segment's last page ids are in use, or its last block, which may reach into others.
    __device__ void ask_next_segment() {
        asked_ = true;
        has_next_ = walk_->advance(next_) && walk_->settle(next_);
        if (!has_next_) return;
        const Segment next = walk_->segment(next_);
        ask_for_pages(next, next.item.sequence == segment_.item.sequence);
    }
    // The first ones of the next segment, which may be here if it is of the same sequence.
    __device__ void ask_for_pages(const Segment& next, bool same_sequence) {
        const SequenceSlice seq = schedule_->slice(next.item.sequence);
        const KeyTiles tiles = key_blocks(seq);
        const int32_t first = page_size_.quotient(tiles.start(next.begin - next.item.begin));
        if (same_sequence && first >= window_ && end_page(seq, tiles, next) <= window_ + 32) {
            next_window_ = window_;
            next_ids_ = ids_;
            return;
        }
        next_window_ = first;
        next_ids_ = load_ids(next.item, first, num_pages(seq));
    }
    __device__ uint32_t load_ids(const Item& item, int32_t first, int32_t end) const {
        const int32_t page = first + static_cast<int32_t>(threadIdx.x % 32);
        return page < end ? p_.page_table[item.sequence * p_.page_table_stride + page] : 0;
    }
    __device__ int32_t num_pages(const SequenceSlice& seq) const {
        return page_size_.quotient(seq.see.seqlen_k + p_.page_size - 1);
    }
    // Behind the last page that the segment needs.
    __device__ int32_t end_page(const SequenceSlice& seq, const KeyTiles& tiles,
                                const Segment& segment) const {
        const int32_t end_key = tiles.start(segment.end - 1 - segment.item.begin) + kBlockKeys;
        return page_size_.quotient(min(end_key, seq.see.seqlen_k) + p_.page_size - 1);
    }

    const AttentionParams& p_;
    const FastDivide &page_size_, &group_size_;
    RowCopier<T, Config> rows_;
    const Schedule<Config::kThreads>* schedule_ = nullptr;
    const Walk* walk_ = nullptr;
    Segment segment_;
    typename Walk::Position next_;  // where the walk is: until more is asked for, at this segment
    bool asked_, has_next_;         // for the next segment; whether there is one
    SequenceSlice seq_;
    KeyTiles tiles_{Visibility{}, 0, 0, kBlockKeys};
    uint32_t head_offset_;
    int32_t end_page_, window_, next_window_;  // window_: the page whose id lane 0 holds
    uint32_t ids_, next_ids_;
};

}  // namespace octavo::cuda
