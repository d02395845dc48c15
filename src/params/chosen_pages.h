// The pages of each sequence, or of each of its KV heads, that are read where a caller chooses some (Quest,
// Tang et al. 2024, arXiv:2406.10774).
//
// Their keys follow each other: key i of a list lies in slot i % page_size of its (i / page_size)-th page. So
// kernels count keys, and turn such a number into a position where one is needed.
#pragma once

#include "params/index_array.h"

#include <cstdint>

namespace octavo {

struct ChosenPages {
    // [batch, num_kv_heads or 1, num_chosen]: columns of the page table, ascending, then -1; null: all pages.
    IndexArray lists;
    int64_t batch_stride, head_stride;
    int32_t num_chosen;       // entries of a list, no more than a sequence may have pages
    bool has_lists_of_heads;  // otherwise one for all of them

    OCTAVO_HD explicit operator bool() const { return static_cast<bool>(lists); }
    OCTAVO_HD IndexArray list(int32_t sequence, int32_t kv_head) const {
        return lists.from(sequence * batch_stride + kv_head * head_stride);
    }
};

}  // namespace octavo
