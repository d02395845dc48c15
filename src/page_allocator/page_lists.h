// One group of layers: its pages on the device and in host memory, and which of them every sequence holds.
#pragma once

#include "page_allocator/page_pool.h"
#include "page_allocator/sequence_table.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

namespace octavo {

struct PageList {
    // Entries of [ceil(length / page_size)] pages; an ended sequence leaves the memory. One of the device by
    // its number; one of the host by the complement of its number; kReturned for one behind the window.
    std::vector<int32_t> pages;
    uint64_t revision = 0;     // a new one whenever the pages change otherwise than by growing at the end
    int32_t num_returned = 0;  // the first pages, which the window has left behind

    static constexpr int32_t kReturned = std::numeric_limits<int32_t>::min();
    static bool is_on_host(int32_t entry) { return entry < 0 && entry != kReturned; }

    // As kernels read it: where pages were returned, the first one that is left, or 0. No query sees those.
    void write(int32_t* row, size_t first = 0) const;
};

class PageLists {
  public:
    // What growing a sequence takes.
    struct Growth {
        int32_t num_new_pages;
        bool copies_tail;  // the last page is partly filled, and others read it too

        int64_t num_pages() const { return int64_t{num_new_pages} + copies_tail; }
    };

    // window_left: -1, or how many tokens before its own a query sees.
    PageLists(int32_t num_pages, int32_t page_size, int32_t window_left, int32_t num_host_pages,
              StoredPages* cache)
        : pool(num_pages, cache), host(num_host_pages), page_size_(page_size), window_left_(window_left) {}

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

    // Of the pages of a sequence, how many no query sees from position `length` on. Never the last one:
    // growing fills it.
    size_t num_behind(int64_t length, size_t num_pages) const {
        if (window_left_ < 0 || length <= window_left_ || num_pages == 0) return 0;
        return std::min(static_cast<size_t>((length - window_left_) / page_size_), num_pages - 1);
    }
    // The pages of a sequence, by their index in it, that are returned before it grows from this length by a
    // number of new pages.
    struct Behind {
        size_t begin, end;
    };
    Behind behind(size_t index, int32_t length, int32_t num_new_pages) const {
        const PageList& list = lists_[index];
        const auto begin = static_cast<size_t>(list.num_returned);
        const size_t num_grown = list.pages.size() + static_cast<size_t>(num_new_pages);
        return {begin, std::max(begin, num_behind(length, num_grown))};
    }
    void return_pages(size_t index, Behind behind) noexcept {
        if (behind.begin < behind.end) return_before(index, behind.end);
    }
    // The lengths from which a sequence can go on, with the pages that it still has: 0, and from this one.
    int64_t min_length(size_t index) const {
        const int32_t num_returned = lists_[index].num_returned;
        return num_returned == 0 ? 0 : int64_t{num_returned} * page_size_ + window_left_;
    }

    // The list is empty and has the room (reserve).
    void hold(size_t index, const int32_t* pages, size_t num_pages) noexcept;
    void truncate(size_t index, int32_t length) noexcept;
    // Holds the pages of that list instead, and leaves its own there. Somebody holds every one of them
    // already.
    void exchange(size_t index, PageList& list) noexcept;
    void release(const PageList& list) noexcept { release_from(list.pages, 0); }
    void replace(size_t index, size_t position, int32_t page) noexcept;  // holds this one instead

    // Moving the pages of some sequences (entries) to the host, and back: all of one plan, once each. Pages
    // that a sequence beside these holds stay. Both sides of every copy are reserved, until unreserve.
    struct Move {
        std::vector<PageCopy> copies;                  // `to` is filled in when the move is made
        std::unordered_map<int32_t, size_t> position;  // in `copies`, of an entry of the lists
        std::unordered_map<int32_t, int32_t> intact;   // the page with the same contents that needs no copy
    };
    Move plan_leaving(const std::vector<size_t>& entries) const;
    // `intact`: pages of the device that hold the same as a host page (an entry of the lists).
    Move plan_arriving(const std::vector<size_t>& entries, std::unordered_map<int32_t, int32_t> intact) const;
    int64_t num_pages_for(const Move& arriving) const;  // free ones
    void leave(const std::vector<size_t>& entries, Move& move) noexcept { make(entries, move, pool, host); }
    void arrive(const std::vector<size_t>& entries, Move& move) noexcept { make(entries, move, host, pool); }

    // Throws Error at the first contradiction. `reserved`: pages reserved on the device and on the host.
    void check(const SequenceTable& sequences, const std::vector<int32_t>& reserved,
               const std::vector<int32_t>& reserved_on_host) const;

    PagePool pool;  // on the device
    PagePool host;

  private:
    void release_entry(int32_t entry) noexcept {
        if (entry >= 0) {
            pool.release(entry);
        } else if (entry != PageList::kReturned) {
            host.release(~entry);
        }
    }
    // Last to first, so that they are handed out again first to last, and evicted deepest first.
    void release_from(const std::vector<int32_t>& pages, size_t first) noexcept {
        for (size_t i = pages.size(); i-- > first;) release_entry(pages[i]);
    }
    void hold_entries(const std::vector<int32_t>& pages) noexcept;
    void return_before(size_t index, size_t end) noexcept;
    void make(const std::vector<size_t>& entries, Move& move, PagePool& from, PagePool& to) noexcept;
    void check_tier(const SequenceTable& sequences, const PagePool& tier,
                    const std::vector<int32_t>& reserved) const;

    int32_t page_size_;
    int32_t window_left_;
    std::vector<PageList> lists_;
    uint64_t last_revision_ = 0;
};

}  // namespace octavo
