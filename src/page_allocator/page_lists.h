// One group of layers: its pool, and which pages of it every sequence holds.
#pragma once

#include "page_allocator/page_pool.h"
#include "page_allocator/sequence_table.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace octavo {

struct PageList {
    std::vector<int32_t> pages;  // [ceil(length / page_size)]; an ended sequence leaves the memory
    uint64_t revision = 0;       // a new one whenever the pages change otherwise than by growing at the end
};

class PageLists {
  public:
    // What growing a sequence takes.
    struct Growth {
        int32_t num_new_pages;
        bool copies_tail;  // the last page is partly filled, and others read it too

        int64_t num_pages() const { return int64_t{num_new_pages} + copies_tail; }
    };

    PageLists(int32_t num_pages, int32_t page_size, PrefixCache* cache)
        : pool(num_pages, cache), page_size_(page_size) {}

    int32_t page_size() const { return page_size_; }
    int32_t pages_for(int32_t length) const { return length / page_size_ + (length % page_size_ != 0); }
    const PageList& operator[](size_t index) const { return lists_[index]; }

    void resize(size_t num_entries) {
        if (lists_.size() < num_entries) lists_.resize(num_entries);
    }
    void reserve(size_t index, size_t num_pages);  // so that this many pages fit; amortised

    Growth plan(size_t index, int32_t length, int32_t n) const {
        const std::vector<int32_t>& pages = lists_[index].pages;
        const int64_t num_slots_left = static_cast<int64_t>(pages.size()) * page_size_ - length;
        Growth growth{0, n > 0 && num_slots_left > 0 && pool.must_copy(pages.back())};
        if (n > num_slots_left) {
            growth.num_new_pages = static_cast<int32_t>((n - num_slots_left + page_size_ - 1) / page_size_);
        }
        return growth;
    }
    // Needs the room (reserve, and the pool's reserve_copies) and the pages.
    void grow(size_t index, Growth growth) noexcept;

    // The list is empty and has the room (reserve).
    void hold(size_t index, const int32_t* pages, size_t num_pages) noexcept;
    void truncate(size_t index, int32_t length) noexcept;
    // Holds these instead, and leaves the old ones in `pages`. Somebody holds every one of them already.
    void exchange(size_t index, std::vector<int32_t>& pages) noexcept;
    void release(const std::vector<int32_t>& pages) noexcept { release_from(pages, 0); }
    void replace(size_t index, size_t position, int32_t page) noexcept;  // holds this one instead

    void check(const SequenceTable& sequences) const;  // throws Error at the first contradiction

    PagePool pool;

  private:
    // Last to first, so that they are handed out again first to last, and evicted deepest first.
    void release_from(const std::vector<int32_t>& pages, size_t first) noexcept {
        for (size_t i = pages.size(); i-- > first;) pool.release(pages[i]);
    }

    int32_t page_size_;
    std::vector<PageList> lists_;
    uint64_t last_revision_ = 0;
};

}  // namespace octavo
