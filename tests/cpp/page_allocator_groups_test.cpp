// Groups of layers under one sequence: page sizes and windows of their own. Last, random calls against a
// cache of tokens in which every query looks at all that it may see.
#include "allocator_testing.h"

#include <octavo/page_allocator.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace octavo {
namespace {

using Pages = std::vector<int32_t>;

TEST(PageGroups, ReturnThePagesBehindTheirWindow) {
    PageAllocator allocator({{16, 4}, {16, 4, 5}});
    Sequence a = allocator.create();
    allocator.extend(a, 14);  // a prompt: its first query sees the first page
    EXPECT_EQ(allocator.pages(a, 1), Pages({0, 1, 2, 3}));
    allocator.extend(a, 1);  // query 14 sees 9 and on
    EXPECT_EQ(allocator.pages(a, 0), Pages({0, 1, 2, 3}));
    EXPECT_EQ(allocator.pages(a, 1), Pages({-1, -1, 2, 3}));
    EXPECT_EQ(allocator.num_free_pages(0), 12);
    EXPECT_EQ(allocator.num_free_pages(1), 14);
    Pages table(5, 77), seq_lens(1);
    allocator.write_page_table(&a, 1, table.data(), 5, seq_lens.data(), 1);
    EXPECT_EQ(table, Pages({2, 2, 2, 3, -1}));  // pages that exist, for kernels that check
    allocator.check_invariants();

    Sequence b = allocator.fork(a)[0];
    EXPECT_EQ(allocator.pages(b, 1), Pages({-1, -1, 2, 3}));
    allocator.extend(b, 6);
    EXPECT_EQ(allocator.num_free_pages(1), 11);  // a copy of the last page, and two more
    EXPECT_EQ(allocator.stats(1).num_stored_tokens, 4 + 3 + 8 + 1);
    allocator.truncate(a, 13);
    EXPECT_EQ(message_of<ValueError>([&] { allocator.truncate(a, 12); }),
              "truncate: length (12) must be 0 or at least 13: the pages before its window were returned in "
              "group 1");
    EXPECT_EQ(
        message_of<ValueError>([&] { allocator.fork(b, 1, 12); }),
        "fork: length (12) must be 0 or at least 13: the pages before its window were returned in group "
        "1");
    allocator.truncate(a, 0);
    allocator.extend(a, 3);
    EXPECT_EQ(allocator.pages(a, 1).size(), 1u);
    allocator.check_invariants();
    allocator.free(b);
    allocator.free(a);
    EXPECT_EQ(allocator.num_free_pages(1), 16);
}

TEST(PageGroups, ALongSequenceNeedsTheWindowOnly) {
    PageAllocator allocator({{3, 4, 6}});
    Sequence a = allocator.create();
    for (int i = 0; i < 1000; ++i) {
        allocator.extend(a, 1);
        allocator.check_invariants();
    }
    EXPECT_EQ(allocator.length(a), 1000);
    PageAllocator none({{2, 4, 0}});  // each query sees itself
    Sequence b = none.create();
    for (int i = 0; i < 18; ++i) none.extend(b, i % 2);
    none.truncate(b, 8);  // nothing is left that a query sees
    EXPECT_EQ(none.pages(b), Pages({-1, -1}));
    Pages table(2), seq_lens(1);
    none.write_page_table(&b, 1, table.data(), 2, seq_lens.data());
    EXPECT_EQ(table, Pages({0, 0}));
    for (int i = 0; i < 100; ++i) none.extend(b, i % 2);
    none.check_invariants();
    EXPECT_EQ(message_of<ValueError>([] { PageAllocator({{4, 4, -2}}); }),
              "PageAllocator: window_left (-2) must be -1 (unbounded) or at least 0");
    EXPECT_EQ(message_of<ValueError>([] { PageAllocator({{4, 4, 7}}, PrefixCacheOptions{}); }),
              "PageAllocator: prefix_cache must be off with a window; window_left is 7");
}

TEST(PageGroups, AllOfThemOrNone) {
    PageAllocator allocator({{8, 4}, {2, 4}});
    Sequence a = allocator.create();
    EXPECT_FALSE(allocator.try_extend(a, 12));
    EXPECT_EQ(allocator.num_free_pages(0), 8);
    EXPECT_EQ(message_of<OutOfPages>([&] { allocator.extend(a, 12); }),
              "extend: needs 3 pages (3 new, 0 copy-on-write), 2 free in group 1");
    EXPECT_TRUE(allocator.try_extend(a, 8));
    EXPECT_EQ(message_of<ValueError>([&] { allocator.stats(2); }),
              "stats: group (2) must be one of the 2 groups");
}

TEST(PageGroups, AStepReturnsBeforeItTakes) {
    PageAllocator allocator({{16, 4}, {3, 4, 4}});
    Sequence a = allocator.create();
    allocator.extend(a, 12);
    EXPECT_EQ(allocator.num_free_pages(1), 0);
    int32_t n = 9;
    EXPECT_EQ(allocator.needed(&a, &n, 1, 1), 1);  // three new ones for two behind the window of token 12
    EXPECT_EQ(message_of<OutOfPages>([&] { allocator.extend(a, 9); }),
              "extend: needs 3 pages (3 new, 0 copy-on-write), 2 free in group 1");
    EXPECT_EQ(allocator.pages(a, 1), Pages({0, 1, 2}));
    n = 5;
    EXPECT_EQ(allocator.needed(&a, &n, 1, 1), 0);
    EXPECT_EQ(allocator.needed(&a, &n, 1, 0), 2);
    allocator.extend(a, 5);
    EXPECT_EQ(allocator.pages(a, 1), Pages({-1, -1, 2, 0, 1}));
    allocator.check_invariants();

    // What two hold is free when both have returned it; one alone finds too little.
    PageAllocator shared({{16, 4}, {4, 4, 4}});
    Sequence b = shared.create();
    shared.extend(b, 12);
    const std::vector<Sequence> both = {b, shared.fork(b)[0]};
    Pages tables[2] = {Pages(2 * 8), Pages(2 * 8)}, seq_lens(2);
    StepArrays arrays(2, {{tables[0].data(), 8, 8}, {tables[1].data(), 8, 8}}, seq_lens.data());
    const int32_t counts[] = {4, 8};
    EXPECT_EQ(shared.needed(both.data(), counts, 1, 1), 1);
    EXPECT_EQ(shared.needed(&both[1], &counts[1], 1, 1), 2);
    EXPECT_FALSE(shared.try_extend(both[1], 8));
    EXPECT_EQ(shared.needed(both.data(), counts, 2, 1), 1);
    shared.step(both.data(), counts, 2, arrays);
    EXPECT_EQ(shared.num_free_pages(1), 0);
    shared.check_invariants();
    const int32_t more[] = {20, 1};
    EXPECT_EQ(message_of<OutOfPages>([&] { shared.step(both.data(), more, 2, arrays); }),
              "step: 1 of 2 sequences needs pages that are not free: seqs[0] needs 5, 9 of the 10 free pages "
              "are left in group 0; it needs 5, 0 of the 1 free pages are left in group 1");
}

class HybridSimulation {
  public:
    explicit HybridSimulation(uint32_t seed)
        : random_(seed),
          allocator_(kGroups),
          tables_(kGroups.size(), Pages(kMaxBatch * kMaxPages)),
          seq_lens_(kMaxBatch),
          arrays_(kMaxBatch, table_arrays(), seq_lens_.data()) {
        for (const PageGroup& group : kGroups) {
            slots_.emplace_back(group.num_pages * group.page_size, -1);
            host_slots_.emplace_back(group.num_host_pages * group.page_size, -1);
        }
    }

    void call(bool is_checked) {
        const int64_t action = below(100);
        if (sequences_.empty() || (action < 10 && sequences_.size() < 6)) {
            sequences_.push_back({allocator_.create(), {}});
        } else if (action < 40) {
            step();
        } else if (action < 60) {
            step_batch();
        } else if (action < 70) {
            ModelSequence& s = any();
            if (s.is_away) return;
            const auto length = static_cast<int64_t>(s.tokens.size());
            const int64_t kept = std::max<int64_t>(0, length - below(6));
            try {
                allocator_.truncate(s.handle, kept);
            } catch (const ValueError&) {
                return;  // behind a window
            }
            s.tokens.resize(static_cast<size_t>(kept));
        } else if (action < 78 && sequences_.size() < 6) {
            ModelSequence s = any();
            if (s.is_away) return;
            s.handle = allocator_.fork(s.handle)[0];
            sequences_.push_back(s);
        } else if (action < 88) {
            move();
        } else {
            const int64_t i = below(static_cast<int64_t>(sequences_.size()));
            allocator_.free(sequences_[i].handle);
            sequences_.erase(sequences_.begin() + i);
        }
        if (is_checked) allocator_.check_invariants();
    }

  private:
    // A page size beside another, a window shorter than a page and one longer.
    inline static const std::vector<PageGroup> kGroups = {
        {30, 4, -1, 20}, {40, 2, 5, 20}, {16, 8, 3, 20}, {12, 3, 0, 20}};

    static constexpr int64_t kMaxBatch = 6, kMaxPages = 256;

    std::vector<PageTableArrays> table_arrays() {
        std::vector<PageTableArrays> arrays;
        for (Pages& table : tables_) arrays.push_back({table.data(), kMaxPages, kMaxPages});
        return arrays;
    }

    struct ModelSequence {
        Sequence handle;
        std::vector<int> tokens;  // no two alike
        bool is_away = false;
    };

    int64_t below(int64_t bound) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(bound)); }
    ModelSequence& any() { return sequences_[below(static_cast<int64_t>(sequences_.size()))]; }

    void step() {
        ModelSequence& s = any();
        const int64_t n = below(3) ? 1 : below(10);
        if (s.is_away) return;
        bool fits = true;
        for (size_t g = 0; g < kGroups.size(); ++g) {
            const auto group = static_cast<int64_t>(g);
            const auto num_new = static_cast<int32_t>(n);
            fits =
                fits && allocator_.needed(&s.handle, &num_new, 1, group) <= allocator_.num_free_pages(group);
        }
        ASSERT_EQ(allocator_.try_extend(s.handle, n), fits);
        if (!fits) return;
        make_copies();
        write(s, n);
    }

    // One call for some of the sequences. Of each group it takes what needed() says, no more and no less.
    void step_batch() {
        std::vector<Sequence> batch;
        std::vector<ModelSequence*> chosen;
        std::vector<int32_t> n;
        for (ModelSequence& s : sequences_) {
            if (s.is_away || below(3) == 0) continue;
            batch.push_back(s.handle);
            chosen.push_back(&s);
            n.push_back(static_cast<int32_t>(below(3) ? below(2) : below(12)));
        }
        const auto count = static_cast<int64_t>(batch.size());
        std::vector<int64_t> needed, num_free;
        bool fits = true;
        for (int64_t g = 0; g < allocator_.num_groups(); ++g) {
            needed.push_back(allocator_.needed(batch.data(), n.data(), count, g));
            num_free.push_back(allocator_.num_free_pages(g));
            fits = fits && needed.back() <= num_free.back();
        }
        try {
            allocator_.step(batch.data(), n.data(), count, arrays_);
            ASSERT_TRUE(fits);
        } catch (const OutOfPages& error) {
            ASSERT_FALSE(fits);
            for (auto i = error.indices.rbegin(); i != error.indices.rend(); ++i) {
                batch.erase(batch.begin() + *i);
                n.erase(n.begin() + *i);
            }
            const auto rest = static_cast<int64_t>(batch.size());  // these fit without the others
            for (int64_t g = 0; g < allocator_.num_groups(); ++g) {
                ASSERT_EQ(allocator_.num_free_pages(g), num_free[g]);
                ASSERT_LE(allocator_.needed(batch.data(), n.data(), rest, g), num_free[g]);
            }
            return;
        }
        for (int64_t g = 0; g < allocator_.num_groups(); ++g)
            ASSERT_EQ(needed[g], std::max<int64_t>(num_free[g] - allocator_.num_free_pages(g), 0));
        make_copies();
        for (size_t i = 0; i < chosen.size(); ++i) write(*chosen[i], n[i]);
    }

    void make_copies() {
        for (size_t g = 0; g < kGroups.size(); ++g) {
            const int64_t page_size = kGroups[g].page_size;
            const std::vector<PageCopy> copies = allocator_.take_copies(static_cast<int64_t>(g));
            check_copies(copies);
            for (PageCopy copy : copies)
                std::copy_n(&slots_[g][copy.from * page_size], page_size, &slots_[g][copy.to * page_size]);
        }
    }

    // The sequence has grown by n tokens: writes them, and looks at all that their queries see.
    void write(ModelSequence& s, int64_t n) {
        const auto length = static_cast<int64_t>(s.tokens.size());
        for (int64_t i = 0; i < n; ++i) s.tokens.push_back(next_token_++);
        for (size_t g = 0; g < kGroups.size(); ++g) {
            const int64_t page_size = kGroups[g].page_size;
            const auto group = static_cast<int64_t>(g);
            const Pages pages = allocator_.pages(s.handle, group);
            Pages row(pages.size()), seq_lens(1);
            allocator_.write_page_table(&s.handle, 1, row.data(), static_cast<int64_t>(row.size()),
                                        seq_lens.data(), group);
            for (size_t i = 0; i < pages.size(); ++i) {
                ASSERT_TRUE(row[i] >= 0 && row[i] < kGroups[g].num_pages);
                ASSERT_TRUE(pages[i] < 0 || row[i] == pages[i]);
            }
            auto slot = [&](int64_t i) -> int& {
                return slots_[g][pages[i / page_size] * page_size + i % page_size];
            };
            for (int64_t i = length; i < length + n; ++i) {
                ASSERT_GE(pages[i / page_size], 0);
                slot(i) = s.tokens[i];
            }
            const int64_t window = kGroups[g].window_left;
            for (int64_t i = window < 0 ? 0 : std::max<int64_t>(0, length - window); i < length + n; ++i) {
                ASSERT_GE(pages[i / page_size], 0);
                ASSERT_EQ(slot(i), s.tokens[i]);
            }
        }
    }

    void move() {
        ModelSequence& s = any();
        Transfer transfer;
        try {
            transfer = s.is_away ? allocator_.resume(&s.handle, 1) : allocator_.preempt(&s.handle, 1);
        } catch (const OutOfPages&) {
            return;
        }
        for (size_t g = 0; g < kGroups.size(); ++g) {
            const int64_t page_size = kGroups[g].page_size;
            std::vector<int>& from = s.is_away ? host_slots_[g] : slots_[g];
            std::vector<int>& to = s.is_away ? slots_[g] : host_slots_[g];
            for (PageCopy copy : transfer.copies[g]) {
                std::copy_n(&from[copy.from * page_size], page_size, &to[copy.to * page_size]);
            }
        }
        allocator_.confirm(transfer.id);
        s.is_away = !s.is_away;
    }

    std::mt19937_64 random_;
    PageAllocator allocator_;
    std::vector<Pages> tables_;
    Pages seq_lens_;
    StepArrays arrays_;
    std::vector<std::vector<int>> slots_, host_slots_;  // one a group
    std::vector<ModelSequence> sequences_;
    int next_token_ = 0;
};

TEST(PageGroupsModel, EveryQuerySeesItsWindow) {
    HybridSimulation simulation(1);
    const int64_t num_calls = num_random_calls(20000);
    for (int64_t i = 0; i < num_calls; ++i) {
        simulation.call(is_checked(i));
        if (HasFatalFailure()) FAIL() << "at call " << i;
    }
}

}  // namespace
}  // namespace octavo
