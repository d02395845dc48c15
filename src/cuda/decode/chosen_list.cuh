// The pages that are chosen for an item, where the caller chooses some (params/chosen_pages.h). The kernel
// numbers the keys of these pages in the list's order, and works on blocks of such numbers; it looks up a
// key's position in the sequence where ALiBi or a mask needs it.
#pragma once

#include "cuda/decode/parameters.h"
#include "cuda/decode/visible_blocks.cuh"
#include "cuda/ptx/relaxed.h"

namespace octavo::cuda {

struct ChosenList {
    static constexpr int32_t kBehindAll = 1 << 30;

    IndexArray pages;   // columns of the page table
    int32_t num_pages;  // pages in the list
    int32_t num_keys;   // keys of these pages that lie in the sequence

    // The last entry that the item's list has room for; it is -1 if the list ends before it.
    __device__ static int32_t last_entry(const AttentionParams& p, int32_t sequence, int32_t kv_head) {
        return ptx::load_relaxed(p.chosen_pages.list(sequence, kv_head).at(p.chosen_pages.num_chosen - 1));
    }
    // Reads an item's list. All lanes of a warp call this together. `last` is the value of last_entry(),
    // `seqlen_k` the sequence's length.
    __device__ static ChosenList of(const AttentionParams& p, int32_t sequence, int32_t kv_head, int32_t last,
                                    int32_t seqlen_k) {
        ChosenList list{p.chosen_pages.list(sequence, kv_head), 0, 0};
        if (seqlen_k == 0) return list;  // padding, whose list is not read
        list.num_pages = p.chosen_pages.num_chosen;
        if (last < 0) {  // the list ends before its last entry
            list.num_pages = list.first_where(list.num_pages - 1, [](int32_t page) { return page < 0; });
            if (list.num_pages == 0) return list;
            last = ptx::load_relaxed(list.pages.at(list.num_pages - 1));
        }
        const int32_t keys_of_last = min(max(seqlen_k - last * p.page_size, 0), p.page_size);
        list.num_keys = (list.num_pages - 1) * p.page_size + keys_of_last;
        return list;
    }

    // The number of the first key that lies at `position` of the sequence or behind it. All lanes of a warp
    // call this together.
    __device__ int32_t first_from(int32_t position, const PageLayout& layout, int32_t page_size) const {
        const int32_t page = layout.page_size.quotient(position);
        const int32_t i = first_where(num_pages, [page](int32_t chosen) { return chosen >= page; });
        const bool is_within = i < num_pages && ptx::load_relaxed(pages.at(i)) == page;
        return min(i * page_size + (is_within ? position - page * page_size : 0), num_keys);
    }

    // The position in the sequence of key number `key` of the list. Numbers behind the last key get a
    // position behind any sequence: the list may end before the sequence does, and then the position after
    // its last key is that of a key which is not chosen.
    __device__ int32_t position(int32_t key, const PageLayout& layout, int32_t page_size) const {
        if (key >= num_keys) return kBehindAll;
        const int32_t i = layout.page_size.quotient(key);
        return *pages.at(i) * page_size + key - i * page_size;
    }

  private:
    // The first of `count` pages for which `is_past` is true, or `count` if it is true for none; it must be
    // true for all pages behind that one.
    template <class Predicate>
    __device__ int32_t first_where(int32_t count, Predicate is_past) const {
        const int32_t lane = threadIdx.x % 32;
        int32_t begin = 0, end = count;  // the page lies between these
#pragma unroll 1
        while (begin < end) {
            const int32_t step = (end - begin + 31) / 32, i = begin + lane * step;
            const uint32_t past = __ballot_sync(~0u, i >= end || is_past(ptx::load_relaxed(pages.at(i))));
            const int32_t first = past == 0 ? 32 : __ffs(past) - 1;
            end = min(begin + first * step, end);
            begin = first == 0 ? end : begin + (first - 1) * step + 1;
        }
        return begin;
    }
};

}  // namespace octavo::cuda
