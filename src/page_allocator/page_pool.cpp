#include "page_allocator/page_pool.h"

#include "common/fail.h"
#include "page_allocator/stored_pages.h"

#include <algorithm>
#include <new>

namespace octavo {

PagePool::PagePool(int32_t num_pages, StoredPages* cache)
    : pages_(static_cast<Page*>(std::calloc(static_cast<size_t>(num_pages), sizeof(Page)))),
      cache_(cache),
      num_pages_(num_pages) {
    if (!pages_ && num_pages > 0) throw std::bad_alloc();
}

int32_t PagePool::num_idle() const { return cache_ ? cache_->num_idle() : 0; }
void PagePool::remove_idle(int32_t page) noexcept { cache_->remove_idle(page); }
int32_t PagePool::evict() noexcept { return cache_->evict(); }

void PagePool::set_free(int32_t page) noexcept {
    if (is_stored(page)) {
        cache_->push_idle(page);
        return;
    }
    pages_[page] = {0, first_free_};
    first_free_ = page;
    ++num_released_;
}

void PagePool::release(int32_t page) noexcept {
    if (drop_holder(page) > 0) return;
    int32_t link = pages_[page].link;
    if (link > 0) return;
    if (link < 0) {
        PageCopy& dropped = pending_copies_[~link];
        int32_t from = dropped.from;
        dropped = pending_copies_.back();
        pages_[dropped.to].link = link;
        pending_copies_.pop_back();
        unreserve(from);
    }
    set_free(page);
}

void PagePool::unreserve(int32_t page) noexcept {
    if (--pages_[page].link == 0 && num_holders(page) == 0) set_free(page);
}

void PagePool::reserve_copies(int64_t count) {
    size_t needed = pending_copies_.size() + static_cast<size_t>(count);
    if (pending_copies_.capacity() < needed) pending_copies_.reserve(std::max<size_t>(2 * needed, 16));
}

int32_t PagePool::copy_on_write(int32_t page) noexcept {
    assert(must_copy(page) && pending_copies_.size() < pending_copies_.capacity());
    int32_t to = acquire();
    int32_t link = pages_[page].link;
    int32_t from = link < 0 ? pending_copies_[~link].from : page;
    ++pages_[from].link;
    pages_[to].link = ~static_cast<int32_t>(pending_copies_.size());
    pending_copies_.push_back({from, to});
    drop_holder(page);
    return to;
}

void PagePool::take_copies(PageCopy* copies) noexcept {
    std::copy(pending_copies_.begin(), pending_copies_.end(), copies);
    for (PageCopy copy : pending_copies_) {
        pages_[copy.to].link = 0;
        unreserve(copy.from);
    }
    pending_copies_.clear();
}

void PagePool::write_states(int64_t* states) const {
    std::fill_n(states, num_pages_, static_cast<int64_t>(PageState::free));
    for (int32_t page = 0; page < num_touched_; ++page) {
        states[page] = static_cast<int64_t>(is_shared(page) ? PageState::shared
                                            : is_idle(page) ? PageState::cached
                                                            : PageState::reserved);
    }
    for (int32_t page = first_free_; page != kNone; page = pages_[page].link) {
        states[page] = static_cast<int64_t>(PageState::free);
    }
}

void PagePool::check(const std::vector<int32_t>& holders, const std::vector<int32_t>& reserved) const {
    auto fail_page = [](int32_t page, const auto&... what) {
        fail<Error>("check_invariants", "page ", page, ' ', what...);
    };
    std::vector<bool> is_free(static_cast<size_t>(num_touched_));
    int32_t num_listed = 0;
    for (int32_t page = first_free_; page != kNone; page = pages_[page].link, ++num_listed) {
        if (page < 0 || page >= num_touched_) fail_page(page, "is listed as free, but was never handed out");
        if (is_free[page]) fail_page(page, "is listed as free twice");
        is_free[page] = true;
    }
    if (num_listed != num_released_) {
        fail<Error>("check_invariants", num_listed, " pages are listed as free, but ", num_released_,
                    " counted");
    }

    std::vector<int32_t> num_readers(static_cast<size_t>(num_touched_));
    for (int32_t page : reserved) ++num_readers[page];
    std::vector<int32_t> writer(static_cast<size_t>(num_touched_), kNone);
    for (size_t i = 0; i < pending_copies_.size(); ++i) {
        auto [from, to] = pending_copies_[i];
        if (from < 0 || from >= num_touched_) fail_page(from, "is to be copied, but was never handed out");
        if (to < 0 || to >= num_touched_) fail_page(to, "is to be written, but was never handed out");
        if (writer[to] != kNone) fail_page(to, "is to be written by two copies");
        writer[to] = static_cast<int32_t>(i);
        ++num_readers[from];
    }

    int32_t num_held = 0, num_shared = 0;
    std::vector<bool> stored(static_cast<size_t>(num_touched_)), idle(static_cast<size_t>(num_touched_));
    for (int32_t page = 0; page < num_touched_; ++page) {
        const int32_t num_holders = this->num_holders(page);
        const int32_t link = pages_[page].link;
        stored[page] = is_stored(page);
        idle[page] = is_idle(page);
        if (stored[page] && is_free[page]) fail_page(page, "is stored, but listed as free");
        num_held += num_holders > 0;
        num_shared += num_holders > 1;
        bool is_written = writer[page] != kNone;
        bool is_reserved = num_readers[page] > 0;
        if (num_holders != holders[page]) {
            fail_page(page, "has ", holders[page], " holders, but counts ", num_holders);
        }
        if (is_written && is_reserved) fail_page(page, "is to be both copied and written");
        if (is_written && num_holders == 0) fail_page(page, "is to be written, but nobody holds it");
        if (is_free[page] && (num_holders > 0 || is_reserved))
            fail_page(page, "is listed as free, but in use");
        if (!is_free[page] && !idle[page] && num_holders == 0 && !is_reserved)
            fail_page(page, "is neither in use nor free");
        if (!is_free[page] && link != (is_written ? ~writer[page] : num_readers[page])) {
            fail_page(page, "does not know of the copies that read or write it");
        }
    }
    if (cache_) cache_->check(stored, idle);
    if (num_held != num_held_ || num_shared != num_shared_) {
        fail<Error>("check_invariants", num_held, " pages are held and ", num_shared, " shared, but ",
                    num_held_, " and ", num_shared_, " counted");
    }
}

}  // namespace octavo
