#include "page_allocator/companion_pages.h"

#include "common/fail.h"

#include <cassert>

namespace octavo {

void CompanionPages::store(int32_t page, int32_t owner) noexcept {
    assert(find(owner) == kNone);
    nodes_[page].owner = owner;
    page_after_[owner] = page + 1;
}

void CompanionPages::forget(int32_t owner) noexcept {
    const int32_t page = find(owner);
    if (page == kNone) return;
    page_after_[owner] = 0;
    nodes_[page].owner = kNone;
    if (!nodes_[page].is_idle) return;
    idle_.remove(nodes_, page);
    idle_.push_front(nodes_, page);
}

int32_t CompanionPages::evict() noexcept {
    const int32_t page = idle_.first();
    assert(page != kNone);
    remove_idle(page);
    if (nodes_[page].owner != kNone) page_after_[nodes_[page].owner] = 0;
    return page;
}

void CompanionPages::check(const std::vector<bool>& is_stored, const std::vector<bool>& is_idle) const {
    auto fail_page = [](int32_t page, const auto&... what) {
        fail<Error>("check_invariants", "page ", page, ' ', what...);
    };
    const auto num_pages = static_cast<int32_t>(is_stored.size());
    int32_t num_idle = 0;
    for (int32_t page = 0; page < num_pages; ++page) {
        num_idle += is_idle[page];
        if (!is_stored[page]) continue;
        const Node& node = nodes_[page];
        if (node.is_idle != is_idle[page]) fail_page(page, "is idle and does not know it, or is not");
        if (node.owner != kNone && find(node.owner) != page)
            fail_page(page, "is stored beside page ", node.owner, ", which has another beside it");
    }
    int32_t num_listed = 0;
    for (int32_t page = idle_.first(); page != kNone; page = nodes_[page].next_idle, ++num_listed) {
        if (!is_idle[page] || num_listed > num_idle)
            fail_page(page, "is listed as idle, but is not, or twice");
    }
    if (num_listed != num_idle || num_idle != idle_.size()) {
        fail<Error>("check_invariants", num_idle, " pages are idle, ", num_listed, " listed and ",
                    idle_.size(), " counted");
    }
}

}  // namespace octavo
