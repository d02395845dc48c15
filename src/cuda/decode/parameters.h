// What a launch of a decode kernel hands to it besides the call's parameters.
#pragma once

#include "common/fast_divide.h"
#include "cuda/decode/tiles.h"
#include "cuda/partial_words.cuh"
#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// How pages hold blocks of keys.
struct PageLayout {
    FastDivide page_size;
    int32_t pages_per_block_log2;  // the most pages that a block of keys touches, as a power of two
    int32_t max_pages;             // columns of the page table that a sequence's keys may need
    int32_t has_gap;               // whether a window may hide blocks behind a prefix (visible_blocks.cuh)

    static PageLayout of(const AttentionParams& p, int32_t block_keys) {
        const int32_t page_size = p.page_size;
        int32_t pages = (block_keys - 2) / page_size + 2;  // wherever the block begins
        if (page_size % block_keys == 0) pages = 1;
        if (block_keys % page_size == 0) pages = block_keys / page_size;
        int32_t log2 = 0;
        while (1 << log2 < pages) ++log2;
        return {FastDivide::by(page_size), log2, (p.seqlen_k - 1) / page_size + 1,
                p.prefix_lens && p.window_left >= 0};
    }
};

// How pages hold codes and their scales.
struct CodeLayout {
    struct Strides {
        uint32_t page, token, head;
    };
    struct Scales {
        const void* data;
        Strides strides;  // in words
    };
    Strides k, v;  // in units of 16 bytes
    Scales k_scales, v_scales;
    FastDivide group_parts;  // KV heads of the call that read the same head of the pages (with_group_parts)
    int32_t has_scales;  // whether scales lie in memory; otherwise softmax_scale and out_scale include them
    // Whether kStepKeys tokens of a head lie in one page and follow each other without a gap, and the rows
    // are those of the instance.
    int32_t k_in_order, v_in_order;

    // `one` points to a one on the device, where only keys or only values have scales in memory.
    static CodeLayout of(const AttentionParams& p, int32_t head_dim, int32_t group_parts, const float* one) {
        auto strides = [](int64_t page, int64_t token, int64_t head) {
            return Strides{static_cast<uint32_t>(page), static_cast<uint32_t>(token),
                           static_cast<uint32_t>(head)};
        };
        auto scales = [&](const CacheScales& from) {
            if (from.data == nullptr) return Scales{one, {0, 0, 0}};
            return Scales{from.data, strides(from.page_stride, from.token_stride, from.head_stride)};
        };
        auto in_order = [&](int32_t own_dim, DType dtype, int64_t token_stride) {
            return own_dim == head_dim && token_stride == head_dim * bits_of(dtype) / 8 &&
                   p.page_size % kStepKeys == 0;
        };
        return {strides(p.k_outer_stride / 16, p.k_token_stride / 16, p.k_head_stride / 16),
                strides(p.v_outer_stride / 16, p.v_token_stride / 16, p.v_head_stride / 16),
                scales(p.k_scales),
                scales(p.v_scales),
                FastDivide::by(group_parts),
                p.k_scales.data != nullptr || p.v_scales.data != nullptr,
                in_order(p.head_dim, p.k_dtype, p.k_token_stride),
                in_order(p.head_dim_v, p.v_dtype, p.v_token_stride)};
    }
};

struct SplitKvLaunch {
    FastDivide group_size;
    PageLayout pages;
    int32_t num_splits;             // the most CTAs that work on an item
    int32_t num_slots;              // CTAs that work on the items of a KV head
    int32_t equal_splits;           // SplitPolicy::by_length: those of an item where all are alike
    int32_t combiners_per_item;     // CTAs that combine an item's splits; 0: its last split combines
    int32_t warps_per_row_log2;     // warps of a combiner that share a row, as a power of two
    int32_t max_fixed_splits_log2;  // SplitPolicy::fixed: see FixedSplits
    uint32_t max_visible_blocks;    // the most that queries of a sequence see; a window may bound it
    SplitPolicy policy;
    FastDivide blocks_per_split;  // SplitPolicy::sized
    int32_t length_first;         // whether CTAs look at the length before all else
    Beside beside;                // what may still run
    // Whether earlier kernels may still write what this one reads first: if there is no promise (static_past)
    // and it runs beside none.
    int32_t waits_first;
    int32_t waits_for_new;      // with the promise: whether it waits for them before queries and new keys
    uint32_t first_that_waits;  // beside a prefix: CTAs of this sequence and later ones end only after it
    int32_t serves_a_part;      // over codes: whether other launches serve some sequences (served_queries)
    // [batch, num_kv_heads, num_splits, rows of an item] rows; by length, [num_kv_heads, num_slots, ...].
    PartialWorkspace partial;
    int32_t partial_words;  // words for all rows of an item
    CodeLayout codes;       // used where there are codes

    // How many splits an item of `blocks` blocks has, unless the policy is by_length.
    OCTAVO_HD int32_t num_splits_of(int32_t blocks) const {
        const int32_t most =
            policy == SplitPolicy::sized ? blocks_per_split.quotient(blocks - 1) + 1 : blocks;
        return blocks > 1 ? (most < num_splits ? most : num_splits) : 1;
    }
};

struct StreamKLaunch {
    FastDivide group_size;
    PageLayout pages;
    int32_t waits_for_new;     // whether only queries and new keys wait for earlier kernels (static_past)
    PartialWorkspace partial;  // [CTAs, rows of an item] rows
    int32_t partial_words;     // words for all rows of an item
    CodeLayout codes;          // used where there are codes
};

}  // namespace octavo::cuda
