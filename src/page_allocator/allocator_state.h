// What a PageAllocator owns. Its calls lock `mutex` first.
#pragma once

#include <octavo/page_allocator.h>

#include "common/fail.h"
#include "page_allocator/page_lists.h"
#include "page_allocator/sequence_table.h"

#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
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
        int64_t num_missing;  // pages that those that do not fit need
        int64_t num_copies;
        int64_t max_pages;  // of the longest, grown
    };

    explicit State(const std::vector<PageGroup>& groups);

    PageLists& group_at(const char* call, int64_t group);
    int64_t max_pages(const Sequence* handles, int64_t count, int64_t group);  // of page_table

    // Checks that the sequences can grow by n[i] tokens (null: one), and makes the room that commit needs.
    // Fills plans and unfit; changes nothing that can be seen.
    void plan(const char* call, const Sequence* handles, const int32_t* n, int64_t count);
    void commit(const int32_t* n) noexcept;  // what was planned last, when all fit

    bool grow_one(const char* call, Sequence sequence, int64_t n);
    [[noreturn]] void throw_unfit(const char* call, int64_t count) const;
    std::string in_group(size_t group) const;  // " in group 1", or nothing where there is but one

    // Room for sequences; throws ValueError in the name of `call` if these would be too many. Returns the
    // entries that they will have.
    std::vector<size_t> reserve_sequences(const char* call, int64_t count);

    std::mutex mutex;
    uint64_t id;  // of this allocator among all of the process
    SequenceTable sequences;
    std::vector<PageLists> groups;

    // Of the last plan.
    uint64_t num_plans = 0;
    std::vector<size_t> planned;   // entries
    std::vector<GroupPlan> plans;  // one a group
    std::vector<int64_t> unfit;    // positions among the sequences planned
    struct NewPages {
        size_t group, entry, num_pages;
    };
    std::vector<NewPages> growing;  // entries that will hold more pages
    std::vector<std::pair<size_t, int32_t>>
        left_pages;  // (group, page) that a sequence leaves by copy-on-write
};

}  // namespace octavo
