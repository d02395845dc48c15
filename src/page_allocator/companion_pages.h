// Stored pages of a further group of layers. Each goes with the page of group 0 that holds the same tokens,
// and is found through it: what is in the PrefixCache says which tokens these are. Evicted least recently
// used first, whatever is before or after them: a window needs no more than its own pages.
#pragma once

#include "page_allocator/stored_pages.h"

#include <cstdint>
#include <vector>

namespace octavo {

class CompanionPages final : public StoredPages {
  public:
    static constexpr int32_t kNone = -1;

    // num_owners: pages of group 0.
    CompanionPages(int32_t num_pages, int32_t num_owners)
        : nodes_(static_cast<size_t>(num_pages)), page_after_(static_cast<size_t>(num_owners)) {}

    int32_t find(int32_t owner) const { return page_after_[owner] - 1; }  // or kNone
    int32_t owner(int32_t page) const { return nodes_[page].owner; }      // of a stored page; or kNone

    void store(int32_t page, int32_t owner) noexcept;  // owner has none

    // The owner is evicted: its companion, if it has one, is not found any more and next to go.
    void forget(int32_t owner) noexcept;

    void push_idle(int32_t page) noexcept override {
        idle_.push_back(nodes_, page);
        nodes_[page].is_idle = true;
    }
    void remove_idle(int32_t page) noexcept override {
        idle_.remove(nodes_, page);
        nodes_[page].is_idle = false;
    }
    int32_t evict() noexcept override;
    int32_t num_idle() const override { return idle_.size(); }
    void check(const std::vector<bool>& is_stored, const std::vector<bool>& is_idle) const override;

  private:
    struct Node {
        int32_t owner;
        int32_t next_idle, previous_idle;
        bool is_idle;
    };

    ZeroedArray<Node> nodes_;
    ZeroedArray<int32_t> page_after_;  // of each owner, its companion + 1; 0: none
    IdleList<Node> idle_;
};

}  // namespace octavo
