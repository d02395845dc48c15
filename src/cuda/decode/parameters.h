// What one launch of a decode kernel is told besides the call's parameters.
#pragma once

#include "common/fast_divide.h"
#include "cuda/decode/tiles.h"
#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// How pages hold blocks of keys.
struct PageLayout {
    FastDivide page_size;
    int32_t pages_per_block_log2;  // that a block of keys may touch, at most, as a power of two
    int32_t max_pages;             // of a sequence: columns of the page table that its keys may need
    int32_t has_gap;  // whether a window hides blocks between a prefix's and its own (visible_blocks.cuh)

    static PageLayout of(const AttentionParams& p) {
        const int32_t page_size = p.page_size;
        int32_t pages = (kBlockKeys - 2) / page_size + 2;  // wherever the block begins
        if (page_size % kBlockKeys == 0) pages = 1;
        if (kBlockKeys % page_size == 0) pages = kBlockKeys / page_size;
        int32_t log2 = 0;
        while (1 << log2 < pages) ++log2;
        return {FastDivide::by(page_size), log2, (p.seqlen_k - 1) / page_size + 1,
                p.prefix_lens && p.window_left >= 0};
    }
};

// The workspace of partial results (partial.cuh). Zero between launches.
struct PartialWorkspace {
    uint32_t* words;
#ifdef OCTAVO_TICKETS
    uint32_t* tickets;  // counts the CTAs that have started
#endif
};

struct SplitKvLaunch {
    FastDivide group_size;
    PageLayout pages;
    int32_t num_splits;             // CTAs that work on an item, at most
    int32_t num_slots;              // CTAs that work on the items of a KV head
    int32_t combiners_per_item;     // CTAs that add up the partial results of its splits
    int32_t warps_per_row_log2;     // of combiners
    int32_t max_fixed_splits_log2;  // SplitPolicy::fixed: see FixedSplits
    uint32_t max_visible_blocks;    // of a sequence, where a window bounds them
    SplitPolicy policy;
    FastDivide blocks_per_split;  // SplitPolicy::sized
    int32_t length_first;         // whether CTAs look at the length before all else
    int32_t overlaps_prefix;  // whether the kernel over a shared prefix, the one before, may go on meanwhile
    uint32_t first_that_waits;  // the CTAs of this and later sequences end no sooner than that kernel
    // [batch, num_kv_heads, num_splits, rows of an item] rows; by length [num_kv_heads, num_slots, ...].
    PartialWorkspace partial;
    int32_t partial_words;  // of all rows of an item

    // Of an item of so many blocks, where the CTAs of the launch are not shared out by length.
    OCTAVO_HD int32_t num_splits_of(int32_t blocks) const {
        const int32_t most =
            policy == SplitPolicy::sized ? blocks_per_split.quotient(blocks - 1) + 1 : blocks;
        return blocks > 1 ? (most < num_splits ? most : num_splits) : 1;
    }
};

struct StreamKLaunch {
    FastDivide group_size;
    PageLayout pages;
    PartialWorkspace partial;  // [CTAs, rows of an item] rows
    int32_t partial_words;     // of all rows of an item
};

}  // namespace octavo::cuda
