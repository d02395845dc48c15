// The keys of one list of chosen pages, counted from its first one.
#pragma once

#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cpu {

struct ChosenKeys {
    IndexArray pages;  // columns of the page table
    int32_t num_pages;
    int32_t page_size;

    static ChosenKeys make(const AttentionParams& p, int32_t sequence, int32_t kv_head) {
        ChosenKeys keys{p.chosen_pages.list(sequence, kv_head), 0, p.page_size};
        if (SequenceSlice::seqlen_k(p, sequence) == 0) return keys;  // padding, whose list says nothing
        while (keys.num_pages < p.chosen_pages.num_chosen && keys.pages[keys.num_pages] >= 0)
            ++keys.num_pages;
        return keys;
    }

    // Where a key sits in the sequence. Those behind the last one sit behind the sequence.
    int32_t position(int32_t key) const {
        const int32_t i = key / page_size < num_pages ? key / page_size : num_pages - 1;
        return pages[i] * page_size + key - i * page_size;
    }
    // The first key at `position` of the sequence or behind it.
    int32_t first_from(int32_t position) const {
        const int32_t page = position / page_size;
        int32_t begin = 0,
                end = num_pages;  // the first page that is not before that one lies in [begin, end]
        while (begin < end) {
            const int32_t middle = begin + (end - begin) / 2;
            if (pages[middle] < page)
                begin = middle + 1;
            else
                end = middle;
        }
        const bool is_within = begin < num_pages && pages[begin] == page;
        return begin * page_size + (is_within ? position % page_size : 0);
    }
};

}  // namespace octavo::cpu
