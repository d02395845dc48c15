#include "page_allocator/page_lists.h"

#include "common/fail.h"

#include <algorithm>
#include <utility>

namespace octavo {

void PageList::write(int32_t* row, size_t first) const {
    const auto num_unseen = static_cast<size_t>(num_returned);
    if (first < num_unseen) {
        std::fill(row + first, row + num_unseen, num_unseen < pages.size() ? pages[num_unseen] : 0);
        first = num_unseen;
    }
    std::copy(pages.begin() + static_cast<std::ptrdiff_t>(first), pages.end(), row + first);
}

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

void PageLists::return_before(size_t index, size_t end) noexcept {
    PageList& list = lists_[index];
    for (size_t i = end; i-- > static_cast<size_t>(list.num_returned);) {
        pool.release(list.pages[i]);
        list.pages[i] = PageList::kReturned;
    }
    list.num_returned = static_cast<int32_t>(end);
    list.revision = ++last_revision_;
}

void PageLists::hold_entries(const std::vector<int32_t>& pages) noexcept {
    for (int32_t entry : pages) {
        if (entry != PageList::kReturned) pool.hold(entry);
    }
}

void PageLists::hold(size_t index, const int32_t* pages, size_t num_pages) noexcept {
    PageList& list = lists_[index];
    list.pages.assign(pages, pages + num_pages);
    list.num_returned = static_cast<int32_t>(std::count(pages, pages + num_pages, PageList::kReturned));
    list.revision = ++last_revision_;
    hold_entries(list.pages);
}

void PageLists::exchange(size_t index, PageList& list) noexcept {
    hold_entries(list.pages);
    std::swap(lists_[index], list);
    lists_[index].revision = ++last_revision_;
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
    list.num_returned = std::min(list.num_returned, static_cast<int32_t>(num_pages));
    list.revision = ++last_revision_;
}

// Host memory

PageLists::Move PageLists::plan_leaving(const std::vector<size_t>& entries) const {
    std::unordered_map<int32_t, int32_t> num_leaving;  // holders, of each page
    for (size_t index : entries) {
        for (int32_t page : lists_[index].pages) ++num_leaving[page];
    }
    Move move;
    for (size_t index : entries) {
        for (int32_t page : lists_[index].pages) {
            if (page == PageList::kReturned || num_leaving[page] < pool.num_holders(page)) continue;
            if (move.position.emplace(page, move.copies.size()).second) move.copies.push_back({page, -1});
        }
    }
    return move;
}

PageLists::Move PageLists::plan_arriving(const std::vector<size_t>& entries,
                                         std::unordered_map<int32_t, int32_t> intact) const {
    Move move;
    move.intact = std::move(intact);
    for (size_t index : entries) {
        for (int32_t entry : lists_[index].pages) {
            if (!PageList::is_on_host(entry) || move.intact.count(entry)) continue;
            if (move.position.emplace(entry, move.copies.size()).second) move.copies.push_back({~entry, -1});
        }
    }
    return move;
}

int64_t PageLists::num_pages_for(const Move& arriving) const {
    std::vector<int32_t> taken;  // out of the free pages
    for (auto [entry, page] : arriving.intact) {
        if (pool.is_idle(page)) taken.push_back(page);
    }
    std::sort(taken.begin(), taken.end());
    taken.erase(std::unique(taken.begin(), taken.end()), taken.end());
    return static_cast<int64_t>(arriving.copies.size() + taken.size());
}

void PageLists::make(const std::vector<size_t>& entries, Move& move, PagePool& from, PagePool& to) noexcept {
    for (size_t index : entries) {
        for (int32_t& entry : lists_[index].pages) {  // before others are taken, which evicts
            const auto found = move.intact.find(entry);
            if (found == move.intact.end()) continue;
            to.hold(found->second);
            release_entry(entry);
            entry = found->second;
        }
    }
    for (PageCopy& copy : move.copies) {
        copy.to = to.acquire();
        from.reserve(copy.from);
        to.reserve(copy.to);
    }
    for (size_t index : entries) {
        PageList& list = lists_[index];
        for (int32_t& entry : list.pages) {
            const auto found = move.position.find(entry);
            if (found == move.position.end()) continue;
            const PageCopy copy = move.copies[found->second];
            to.hold(copy.to);
            from.release(copy.from);
            entry = &to == &host ? ~copy.to : copy.to;
        }
        list.revision = ++last_revision_;
    }
    for (PageCopy copy : move.copies) to.release(copy.to);  // acquire's own
}

void PageLists::check(const SequenceTable& sequences, const std::vector<int32_t>& reserved,
                      const std::vector<int32_t>& reserved_on_host) const {
    for (size_t index = 0; index < lists_.size(); ++index) {
        const SequenceEntry& entry = sequences.entries()[index];
        const PageList& list = lists_[index];
        auto fail_sequence = [&entry](const auto&... what) {
            fail<Error>("check_invariants", "sequence ", entry.handle, ' ', what...);
        };
        if (static_cast<int64_t>(list.pages.size()) != pages_for(entry.length)) {
            fail_sequence("has ", list.pages.size(), " pages for ", entry.length, " tokens");
        }
        for (size_t i = 0; i < list.pages.size(); ++i) {
            if ((list.pages[i] == PageList::kReturned) != (i < static_cast<size_t>(list.num_returned)))
                fail_sequence("has returned ", list.num_returned, " pages, but not page ", i,
                              ", or that too");
        }
    }
    check_tier(sequences, pool, reserved);
    check_tier(sequences, host, reserved_on_host);
}

void PageLists::check_tier(const SequenceTable& sequences, const PagePool& tier,
                           const std::vector<int32_t>& reserved) const {
    std::vector<int32_t> num_holders(static_cast<size_t>(tier.num_touched()));
    std::vector<size_t> last_holder(num_holders.size(), lists_.size());  // the last entry seen to hold a page
    std::vector<size_t> position(num_holders.size());  // of each page in the sequences that hold it
    for (size_t index = 0; index < lists_.size(); ++index) {
        auto fail_sequence = [&](const auto&... what) {
            fail<Error>("check_invariants", "sequence ", sequences.entries()[index].handle, ' ', what...);
        };
        const std::vector<int32_t>& pages = lists_[index].pages;
        for (size_t i = 0; i < pages.size(); ++i) {
            if (pages[i] == PageList::kReturned || (pages[i] < 0) != (&tier == &host)) continue;
            const int32_t page = pages[i] < 0 ? ~pages[i] : pages[i];
            if (page >= tier.num_touched()) fail_sequence("holds page ", page, ", never handed out");
            if (last_holder[page] == index) fail_sequence("holds page ", page, " twice");
            if (num_holders[page]++ > 0 && position[page] != i) {
                fail_sequence("holds page ", page, " at another place than its sharers");
            }
            last_holder[page] = index;
            position[page] = i;
        }
    }
    tier.check(num_holders, reserved);
}

}  // namespace octavo
