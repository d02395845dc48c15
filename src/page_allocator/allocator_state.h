// What a PageAllocator owns. Its calls lock `mutex` first.
#pragma once

#include <octavo/page_allocator.h>

#include "common/fail.h"
#include "page_allocator/page_lists.h"
#include "page_allocator/prefix_cache.h"
#include "page_allocator/sequence_table.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace octavo {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

inline void check_not_negative(const char* call, const char* name, int64_t value) {
    if (value < 0) fail<ValueError>(call, name, " (", value, ") must be at least 0");
}

struct PageAllocator::State {
    // What growing some sequences takes of one group.
    struct GroupPlan {
        int64_t num_free;     // pages left when those that fit have got theirs
        int64_t num_behind;   // of those, what windows return first
        int64_t num_missing;  // pages for the sequences that do not fit
        int64_t num_copies;
        int64_t max_pages;  // of the longest, grown
    };

    State(const std::vector<PageGroup>& groups, const std::optional<PrefixCacheOptions>& prefix_cache);

    PageLists& group_at(const char* call, int64_t group);
    int64_t max_pages(const char* call, const Sequence* handles, int64_t count, int64_t group);
    // max_pages: that of these sequences, or more.
    void write_page_table(const Sequence* handles, int64_t count, int32_t* page_table, int64_t max_pages,
                          int32_t* seq_lens, int64_t group);

    // Checks that the sequences can grow by n[i] tokens (null: one), and makes the room that commit needs.
    // Fills planned, num_new_tokens, plans and unfit; changes nothing that can be seen. As a question it only
    // counts: every sequence gets its pages, so that a plan's num_free may fall below zero, and nothing can
    // be committed.
    void plan(const char* call, const Sequence* handles, const int32_t* n, int64_t count,
              bool is_question = false);
    // Fills plans, and adds to unfit the sequences that do not fit beside those that fit.
    void plan_pages(bool has_returns, bool is_question) noexcept;
    // What lies behind the group's window when planned sequence i grows.
    PageLists::Behind pages_behind(size_t group, size_t i) const;
    // How many pages all of these free, but for those that are unfit. From then on pages that others hold too
    // have a holder less, until the plan is made: left_pages. And those of them that commit may store first
    // are stored: early_pages. Needs room in both, in last_holders and in dropped_copies.
    int64_t plan_returns(size_t group) noexcept;
    // What was planned last, when all fit. `tokens` [sum of num_new_tokens] or null: for the prefix cache.
    void commit(const int32_t* tokens) noexcept;

    // As SequenceTable::find; throws ValueError too, where the sequence's pages are not all on the device.
    SequenceEntry& find_on_device(const char* call, Sequence sequence) {
        SequenceEntry& entry = sequences.find(call, sequence);
        if (entry.place != SequenceEntry::Place::device) throw_not_on_device(call, entry);
        return entry;
    }
    [[noreturn]] static void throw_not_on_device(const char* call, const SequenceEntry& entry);
    std::vector<size_t> find_all_at(const char* call, const Sequence* handles, int64_t count,
                                    SequenceEntry::Place place);  // entries
    // Which host pages of these sequences the prefix cache has on the device too: for each group, entries of
    // its lists with the pages.
    std::vector<std::unordered_map<int32_t, int32_t>> find_intact(const std::vector<size_t>& entries) const;
    Transfer start(const std::vector<size_t>& entries, std::vector<PageLists::Move> moves, bool leaves);
    // Where the prefix cache keeps the tokens of a page.
    int32_t token_page(int32_t page, bool on_host) const;

    bool grow_one(const char* call, Sequence sequence, int64_t n);
    [[noreturn]] void throw_unfit(const char* call, int64_t count) const;
    std::string in_group(size_t group) const;  // " in group 1", or nothing where there is but one

    void free(const char* call, Sequence sequence);
    void check_kept(const char* call, size_t index, int64_t length) const;  // that windows have all they see
    void shorten(SequenceEntry& entry, int32_t length) noexcept;            // all but its pages

    PrefixCache& cache_for(const char* call);  // throws ValueError where there is none
    enum class Wanted : uint8_t { full_pages, tokens, all_but_the_last };
    // How many of the tokens the cache has; `found` are their pages of group 0.
    int64_t find_prefix(const char* call, const int32_t* tokens, int64_t count, const std::string& name,
                        Wanted wanted);
    Sequence create_cached(const char* call, const int32_t* tokens, int64_t count, const std::string& name,
                           Wanted wanted);
    // The sequence has the pages of its new tokens, and still its old length.
    void append_tokens(size_t index, int32_t num_new, const int32_t* tokens) noexcept;
    // Stores the full pages whose tokens are known; returns whether these are all. Done when the next call
    // could find or lose them, not when the tokens come: by then their keys and values are in the caller's
    // arrays, and the page may be exchanged for an equal one. Calls that only look store nothing, since they
    // may come while a step is computed, which may yet fail.
    bool store_pages(size_t index) noexcept;
    void store_beside(size_t g, size_t index, int32_t position) noexcept;
    void wait_to_store(size_t index) noexcept;
    // For a sequence that takes another's pages.
    static void set_known(SequenceEntry& to, const SequenceEntry& from) noexcept;
    void check_stored() const;
    void check_beside(size_t g, int32_t page, int32_t owner) const;
    void store_waiting() noexcept;  // of every sequence that has some

    // Room for sequences; throws ValueError in the name of `call` if these would be too many. Returns the
    // entries that they will have.
    std::vector<size_t> reserve_sequences(const char* call, int64_t count);

    std::mutex mutex;
    uint64_t id;  // of this allocator among all of the process
    SequenceTable sequences;
    std::unique_ptr<PrefixCache> cache;  // of group 0; or null
    std::vector<PageLists> groups;

    std::vector<size_t> waiting;  // entries that may have pages to store
    std::vector<int32_t> found;   // pages of the last match
    int64_t num_queried_tokens = 0, num_hit_tokens = 0;

    // A transfer that is not confirmed.
    struct Flight {
        int64_t id;
        bool leaves;
        std::vector<Sequence> sequences;
        std::vector<std::vector<PageCopy>> copies;  // one list a group
        // Pages that stay, reserved while those after them are: they leave the prefix cache after those.
        std::vector<int32_t> kept;
    };
    std::vector<Flight> flights;
    int64_t next_transfer = 0;

    // What the last plan has found.
    uint64_t num_plans = 0;
    std::vector<size_t> planned;  // entries
    // Of each: a copy, since the caller's own may lie in the arrays that step writes.
    std::vector<int32_t> num_new_tokens;
    std::vector<GroupPlan> plans;  // one a group
    std::vector<int64_t> unfit;    // positions among the sequences planned
    std::vector<char> is_unfit;    // for each of these
    struct NewPages {
        size_t group, entry, num_pages;
    };
    std::vector<NewPages> growing;  // entries that will hold more pages
    // (group, page) that a sequence leaves by copy-on-write, or behind its window though others hold it.
    std::vector<std::pair<size_t, int32_t>> left_pages;
    std::vector<std::pair<size_t, int32_t>> early_pages;  // of the latter, what commit may store before that
    std::vector<int32_t> last_holders, dropped_copies;    // of plan_returns
};

}  // namespace octavo
