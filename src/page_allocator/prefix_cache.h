// Pages that are found again by the tokens in them. A full page is stored as a node below the page before it:
// a tree whose roots are the namespaces. A hash over a page's tokens and all before them finds the
// candidates; a candidate is believed when it lies below the very page that was found before it and holds the
// very tokens, so that no collision of hashes shares a page.
//
// About 60 bytes a page and 4 a token, of pages that have been used: without the tokens, a hit would be a
// belief.
#pragma once

#include <octavo/page_allocator.h>

#include "page_allocator/companion_pages.h"
#include "page_allocator/siphash.h"
#include "page_allocator/stored_pages.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace octavo {

class PrefixCache final : public StoredPages {
  public:
    static constexpr int32_t kNone = -1;
    static constexpr int64_t kMaxPages = 1 << 30;

    // Keeps the tokens of num_pages + num_host_pages pages; only the first can be found.
    PrefixCache(int32_t num_pages, int64_t num_host_pages, int32_t page_size,
                const PrefixCacheOptions& options);

    // A namespace by its name: made if there is none. It lasts while anybody uses it or pages lie below it.
    int32_t use_namespace(const std::string& name);
    void unuse_namespace(int32_t space) noexcept;
    void use_again(int32_t space) noexcept { ++spaces_[space].num_users; }
    int32_t find_namespace(const std::string& name) const;  // or kNone
    static int32_t root(int32_t space) { return ~space; }   // the parent of its first pages

    // The tokens in each page: [page_size], the first ones known.
    int32_t* tokens(int32_t page) { return &tokens_[static_cast<size_t>(page) * page_size_]; }
    const int32_t* tokens(int32_t page) const { return &tokens_[static_cast<size_t>(page) * page_size_]; }

    void copy_tokens(int32_t from, int32_t to, int32_t count) noexcept {
        std::copy_n(tokens(from), count, tokens(to));
    }

    // Appends the pages that hold the first tokens, and returns how many tokens that is. The last page may
    // hold more than the tokens asked for, or others than those, when `partly` allows it.
    int64_t match(int32_t space, const int32_t* tokens, int64_t count, bool partly,
                  std::vector<int32_t>* pages) const;

    // The page below `parent` with these tokens, or kNone.
    int32_t find_below(int32_t parent, const int32_t* tokens) const {
        return find(hash_below(parent, tokens), parent, tokens);
    }
    // Stores a full page below `parent`, unless another with the same tokens is; returns the one stored.
    int32_t store(int32_t page, int32_t parent) noexcept;
    int32_t parent(int32_t page) const { return nodes_[page].parent; }

    // A further group's pages, which go with these.
    CompanionPages& add_companions(int32_t num_pages);
    const std::vector<std::unique_ptr<CompanionPages>>& companions() const { return companions_; }

    void push_idle(int32_t page) noexcept override { idle_.push_back(nodes_, page); }
    void remove_idle(int32_t page) noexcept override { idle_.remove(nodes_, page); }
    int32_t num_idle() const override { return idle_.size(); }
    int32_t evict() noexcept override;  // the page idle for longest, the deepest of its chain

    int64_t num_stored() const { return num_stored_; }
    int64_t num_evicted() const { return num_evicted_; }

    std::vector<CacheEvent> take_events(int64_t* num_lost);

    void check(const std::vector<bool>& is_stored, const std::vector<bool>& is_idle) const override;

  private:
    struct Node {
        Hash128 hash;
        int32_t parent;  // page, or root of a namespace
        int32_t first_child, next_sibling, previous_sibling;
        int32_t next_idle, previous_idle;
    };
    struct Slot {
        int32_t page_after;  // page + 1; 0: empty
        uint32_t tag;        // of the hash
    };
    struct Namespace {
        std::string name;
        Hash128 hash;
        int32_t first_child = kNone;
        int64_t num_users = 0;
    };
    struct Event {
        CacheEvent::Kind kind;
        int32_t page;
        Hash128 key, parent_key;
    };

    Hash128 hash_of(Hash128 parent, const void* bytes, size_t size) const {
        Hash128 hash = siphash13(key_, parent, bytes, size);
        return {hash.low & low_mask_, hash.high & high_mask_};
    }
    Hash128 hash_below(int32_t parent, const int32_t* tokens) const {
        const Hash128 above = parent < 0 ? spaces_[~parent].hash : nodes_[parent].hash;
        return hash_of(above, tokens, page_size_ * sizeof(int32_t));
    }
    static uint32_t tag_of(Hash128 hash) { return static_cast<uint32_t>(hash.high); }
    int32_t find(Hash128 hash, int32_t parent, const int32_t* tokens) const;  // a page, or kNone
    int32_t& first_child(int32_t parent) {
        return parent < 0 ? spaces_[~parent].first_child : nodes_[parent].first_child;
    }
    void erase_slot(int32_t page) noexcept;
    void release_namespace(int32_t space) noexcept;
    void log(CacheEvent::Kind kind, int32_t page) noexcept;

    int32_t num_pages_, page_size_;
    Hash128 key_;
    uint64_t low_mask_, high_mask_;
    ZeroedArray<Node> nodes_;
    ZeroedArray<int32_t> tokens_;
    uint64_t slot_mask_;
    ZeroedArray<Slot> slots_;  // linear probing, at most half full

    std::vector<Namespace> spaces_;
    std::vector<int32_t> free_spaces_;
    std::unordered_map<std::string, int32_t> space_of_;

    IdleList<Node> idle_;
    std::vector<std::unique_ptr<CompanionPages>> companions_;
    int64_t num_stored_ = 0;
    int64_t num_evicted_ = 0;

    std::vector<Event> events_;          // a ring
    std::vector<int32_t> event_tokens_;  // [capacity, page_size]
    size_t first_event_ = 0, num_events_ = 0;
    int64_t num_lost_events_ = 0;
};

}  // namespace octavo
