#include "page_allocator/page_lists.h"

#include "common/fail.h"

#include <algorithm>

namespace octavo {

void PageLists::reserve(size_t index, size_t num_pages) {
    std::vector<int32_t>& pages = lists_[index].pages;
    if (pages.capacity() < num_pages) pages.reserve(std::max(num_pages, 2 * pages.size()));
}

void PageLists::grow(size_t index, Growth growth) noexcept {
    PageList& list = lists_[index];
    if (growth.copies_tail) {
        list.pages.back() = pool.copy_on_write(list.pages.back());
        list.revision = ++last_revision_;
    }
    for (int32_t i = 0; i < growth.num_new_pages; ++i) list.pages.push_back(pool.acquire());
}

void PageLists::hold(size_t index, const int32_t* pages, size_t num_pages) noexcept {
    PageList& list = lists_[index];
    list.pages.assign(pages, pages + num_pages);
    list.revision = ++last_revision_;
    for (int32_t page : list.pages) pool.hold(page);
}

void PageLists::exchange(size_t index, std::vector<int32_t>& pages) noexcept {
    PageList& list = lists_[index];
    for (int32_t page : pages) pool.hold(page);
    list.pages.swap(pages);
    list.revision = ++last_revision_;
}

void PageLists::replace(size_t index, size_t position, int32_t page) noexcept {
    PageList& list = lists_[index];
    pool.hold(page);
    pool.release(list.pages[position]);
    list.pages[position] = page;
    list.revision = ++last_revision_;
}

void PageLists::truncate(size_t index, int32_t length) noexcept {
    PageList& list = lists_[index];
    const size_t num_pages = static_cast<size_t>(pages_for(length));
    if (num_pages >= list.pages.size()) return;
    release_from(list.pages, num_pages);
    list.pages.resize(num_pages);
    list.revision = ++last_revision_;
}

void PageLists::check(const SequenceTable& sequences) const {
    std::vector<int32_t> num_holders(static_cast<size_t>(pool.num_touched()));
    std::vector<int32_t> last_holder(num_holders.size(), -1);  // the last entry seen to hold a page
    std::vector<int32_t> position(num_holders.size());         // of each page in the sequences that hold it
    int32_t index = 0;
    for (const SequenceEntry& entry : sequences.entries()) {
        if (static_cast<size_t>(index) == lists_.size()) break;  // later ones have never been in use
        const std::vector<int32_t>& pages = lists_[index].pages;
        auto fail_sequence = [&entry](const auto&... what) {
            fail<Error>("check_invariants", "sequence ", entry.handle, ' ', what...);
        };
        if (static_cast<int64_t>(pages.size()) != pages_for(entry.length)) {
            fail_sequence("has ", pages.size(), " pages for ", entry.length, " tokens");
        }
        for (size_t i = 0; i < pages.size(); ++i) {
            int32_t page = pages[i];
            if (page < 0 || page >= pool.num_touched())
                fail_sequence("holds page ", page, ", never handed out");
            if (last_holder[page] == index) fail_sequence("holds page ", page, " twice");
            if (num_holders[page]++ > 0 && position[page] != static_cast<int32_t>(i)) {
                fail_sequence("holds page ", page, " at another place than its sharers");
            }
            last_holder[page] = index;
            position[page] = static_cast<int32_t>(i);
        }
        ++index;
    }
    pool.check(num_holders);
}

}  // namespace octavo
