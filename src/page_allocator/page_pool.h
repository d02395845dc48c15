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

class StoredPages;

class PagePool {
  public:
    // num_pages may be 0: a tier that is not there. Stored pages that nobody holds stay in the cache, and are
    // evicted when all others are in use.
    explicit PagePool(int32_t num_pages, StoredPages* cache = nullptr);

    int32_t num_pages() const { return num_pages_; }
    int32_t num_free() const { return num_pages_ - num_touched_ + num_released_ + num_idle(); }
    int32_t num_idle() const;                             // of the free ones, those in the cache
    int32_t num_touched() const { return num_touched_; }  // pages 0 to num_touched - 1 have been held
    int32_t num_held() const { return num_held_; }        // by one sequence or more
    int32_t num_shared() const { return num_shared_; }    // by two or more
    int32_t num_holders(int32_t page) const { return pages_[page].holders & ~kStored; }

    bool is_shared(int32_t page) const { return num_holders(page) > 1; }
    bool is_stored(int32_t page) const { return pages_[page].holders & kStored; }
    bool is_idle(int32_t page) const { return pages_[page].holders == kStored && pages_[page].link == 0; }
    // For a page that somebody holds: whether another sequence does too, or may find it in the cache.
    bool must_copy(int32_t page) const { return pages_[page].holders > 1; }
    bool has_pending_copy(int32_t page) const { return pages_[page].link != 0; }
    // How many pending copies read the page and transfers reserve it.
    int32_t num_readers(int32_t page) const { return pages_[page].link > 0 ? pages_[page].link : 0; }
    // What the pending copy reads that will write the page; -1 if there is none.
    int32_t source_of(int32_t page) const {
        return pages_[page].link < 0 ? pending_copies_[~pages_[page].link].from : kNone;
    }

    void store(int32_t page) noexcept {
        pages_[page].holders |= kStored;
    }  // a held page, in the cache from now on
    void unstore(int32_t page) noexcept { pages_[page].holders &= ~kStored; }  // as before store; still held

    void hold(int32_t page) noexcept {
        const int32_t before = num_holders(page);
        if (before == 0 && pages_[page].link == 0) remove_idle(page);
        ++pages_[page].holders;
        num_held_ += before == 0;
        num_shared_ += before == 1;
    }

    void leave(int32_t page) noexcept {  // one holder of a shared page less
        assert(is_shared(page));
        drop_holder(page);
    }

    // A free page, now held once: the one released last, else the first that never was held, else one out of
    // the cache. Needs one free.
    int32_t acquire() noexcept {
        assert(num_free() > 0);
        int32_t page = first_free_;
        if (page != kNone) {
            first_free_ = pages_[page].link;
            --num_released_;
        } else if (num_touched_ < num_pages_) {
            page = num_touched_++;
        } else {
            page = evict();
        }
        pages_[page] = {1, 0};
        ++num_held_;
        return page;
    }

    // One holder less. The last one takes along the pending copy that would have written the page; a page
    // that pending copies read stays reserved.
    void release(int32_t page) noexcept;

    // A page that nothing may be written to, nor handed out, whoever lets it go, until unreserve.
    void reserve(int32_t page) noexcept { ++pages_[page].link; }
    void unreserve(int32_t page) noexcept;

    // Room for `count` more pending copies, so that copy_on_write cannot fail.
    void reserve_copies(int64_t count);

    // One holder gives up a page for a new one with the same contents. Needs one free page.
    int32_t copy_on_write(int32_t page) noexcept;

    int64_t num_pending_copies() const { return static_cast<int64_t>(pending_copies_.size()); }
    void take_copies(PageCopy* copies) noexcept;  // [num_pending_copies]

    void write_states(
        int64_t* states) const;  // [num_pages], a PageState each; `reserved` too where one holds it

    // Throws Error at the first contradiction. `holders` [num_touched]: how many sequences do hold each page;
    // `reserved`: pages that reserve was called with.
    void check(const std::vector<int32_t>& holders, const std::vector<int32_t>& reserved = {}) const;

  private:
    struct Page {
        int32_t holders;  // how many, and kStored
        // For a free page the next free one, or kNone; 0 for one in the cache. For any other page how many
        // pending copies read it and transfers reserve it, or ~i if pending copy i writes it. No page is both
        // read and written, since a copy of a page that is itself still to be written reads that one's
        // source.
        int32_t link;
    };
    struct Free {
        void operator()(Page* pages) const { std::free(pages); }
    };
    static constexpr int32_t kNone = -1;
    static constexpr int32_t kStored = 1 << 30;

    int32_t drop_holder(int32_t page) noexcept {  // returns how many are left
        --pages_[page].holders;
        const int32_t left = num_holders(page);
        num_shared_ -= left == 1;
        num_held_ -= left == 0;
        return left;
    }
    void set_free(int32_t page) noexcept;
    void remove_idle(int32_t page) noexcept;
    int32_t evict() noexcept;

    std::unique_ptr<Page[], Free> pages_;  // from calloc: the kernel zeroes a page of it at its first use
    StoredPages* cache_;                   // or null
    std::vector<PageCopy> pending_copies_;
    int32_t num_pages_;
    int32_t num_touched_ = 0;
    int32_t num_released_ = 0;  // length of the list that starts at first_free_
    int32_t first_free_ = kNone;
    int32_t num_held_ = 0;
    int32_t num_shared_ = 0;
};

}  // namespace octavo
