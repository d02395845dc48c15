// The pages themselves: how many sequences hold each, which are free, and the copies still to be made
// between them. 8 bytes a page, and memory that no page has needed yet is never touched.
#pragma once

#include <octavo/page_allocator.h>

#include <cassert>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace octavo {

class PagePool {
  public:
    explicit PagePool(int32_t num_pages);  // 0: a tier that is not there

    int32_t num_pages() const { return num_pages_; }
    int32_t num_free() const { return num_pages_ - num_touched_ + num_released_; }
    int32_t num_touched() const { return num_touched_; }  // pages 0 to num_touched - 1 have been held
    int32_t num_held() const { return num_held_; }        // by one sequence or more
    int32_t num_shared() const { return num_shared_; }    // by two or more
    int32_t num_holders(int32_t page) const { return pages_[page].num_holders; }

    bool is_shared(int32_t page) const { return pages_[page].num_holders > 1; }

    void hold(int32_t page, int32_t count = 1) noexcept {
        if (count == 0) return;
        int32_t before = pages_[page].num_holders;
        pages_[page].num_holders += count;
        num_held_ += before == 0;
        num_shared_ += before < 2 && before + count > 1;
    }

    void leave(int32_t page) noexcept {  // one holder of a shared page less
        assert(is_shared(page));
        drop_holder(page);
    }

    // A free page, now held once: the one released last, else the first that never was held. Needs one free.
    int32_t acquire() noexcept {
        assert(num_free() > 0);
        int32_t page = first_free_;
        if (page == kNone) {
            page = num_touched_++;
        } else {
            first_free_ = pages_[page].link;
            --num_released_;
        }
        pages_[page] = {1, 0};
        ++num_held_;
        return page;
    }

    // One holder less. The last one takes along the pending copy that would have written the page; a page
    // that pending copies read stays reserved.
    void release(int32_t page) noexcept;

    // Room for `count` more pending copies, so that copy_on_write cannot fail.
    void reserve_copies(int64_t count);

    // One holder gives up a shared page for a new one with the same contents. Needs one free page.
    int32_t copy_on_write(int32_t page) noexcept;

    int64_t num_pending_copies() const { return static_cast<int64_t>(pending_copies_.size()); }
    void take_copies(PageCopy* copies) noexcept;  // [num_pending_copies]

    // Throws Error at the first contradiction. `holders` [num_touched]: how many sequences do hold each page.
    void check(const std::vector<int32_t>& holders) const;

  private:
    struct Page {
        int32_t num_holders;
        // Of a free page: the next free one, or kNone. Of any other: how many pending copies read it, or
        // ~i if pending copy i writes it. No page is both read and written, since a copy of a page that is
        // itself still to be written reads that page's own source.
        int32_t link;
    };
    struct Free {
        void operator()(Page* pages) const { std::free(pages); }
    };
    static constexpr int32_t kNone = -1;

    int32_t drop_holder(int32_t page) noexcept {  // returns how many are left
        int32_t left = --pages_[page].num_holders;
        num_shared_ -= left == 1;
        num_held_ -= left == 0;
        return left;
    }
    void push_free(int32_t page) noexcept;
    void release_source(int32_t page) noexcept;

    std::unique_ptr<Page[], Free> pages_;  // from calloc: the kernel zeroes a page of it at its first use
    std::vector<PageCopy> pending_copies_;
    int32_t num_pages_;
    int32_t num_touched_ = 0;
    int32_t num_released_ = 0;  // length of the list that starts at first_free_
    int32_t first_free_ = kNone;
    int32_t num_held_ = 0;
    int32_t num_shared_ = 0;
};

}  // namespace octavo
