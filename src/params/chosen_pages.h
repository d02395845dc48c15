// The pages of each sequence, or of each of its KV heads, that are read where the caller chooses some of them
// (Quest, Tang et al. 2024, arXiv:2406.10774).
//
// The keys of a list are numbered in its order: key i lies in slot i % page_size of the list's page i /
// page_size. Kernels count keys by these numbers, and turn one into a position where they need one.
#pragma once

#include "params/index_array.h"

#include <cstdint>

namespace octavo {

struct ChosenPages {
    // [batch, num_kv_heads or 1, num_chosen]: columns of the page table, ascending, then -1; null: all pages.
    IndexArray lists;
    int64_t batch_stride, head_stride;
    int32_t num_chosen;       // entries of a list, no more than a sequence may have pages
    bool has_lists_of_heads;  // whether each KV head has a list; otherwise all of them share one

    OCTAVO_HD explicit operator bool() const { return static_cast<bool>(lists); }
    OCTAVO_HD IndexArray list(int32_t sequence, int32_t kv_head) const {
        return lists.from(sequence * batch_stride + kv_head * head_stride);
    }
};

}  // namespace octavo
