// Each documented behaviour of octavo::PageAllocator, one by one.
#include "allocator_testing.h"

#include <octavo/page_allocator.h>

#include <gtest/gtest.h>

#include <limits>
#include <utility>

namespace octavo {
namespace {

using Pages = std::vector<int32_t>;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

std::vector<std::pair<int32_t, int32_t>> take_pairs(PageAllocator& allocator) {
    std::vector<std::pair<int32_t, int32_t>> pairs;
    for (PageCopy copy : allocator.take_copies()) pairs.emplace_back(copy.from, copy.to);
    return pairs;
}

using Pairs = std::vector<std::pair<int32_t, int32_t>>;

TEST(PageAllocator, GrowsByWholePages) {
    PageAllocator allocator(8, 4);
    Sequence a = allocator.create();
    EXPECT_EQ(allocator.length(a), 0);
    EXPECT_EQ(allocator.pages(a), Pages());
    allocator.extend(a, 4);
    EXPECT_EQ(allocator.pages(a), Pages({0}));
    allocator.extend(a, 1);
    EXPECT_EQ(allocator.pages(a), Pages({0, 1}));
    allocator.extend(a, 3);
    EXPECT_EQ(allocator.pages(a), Pages({0, 1}));
    EXPECT_EQ(allocator.length(a), 8);
    EXPECT_EQ(allocator.num_free_pages(), 6);
}

TEST(PageAllocator, HandsOutFreedPagesFirstAndInOrder) {
    PageAllocator allocator(8, 1);
    Sequence a = allocator.create(), b = allocator.create();
    allocator.extend(a, 3);
    allocator.extend(b, 1);
    allocator.free(a);
    allocator.extend(b, 4);
    EXPECT_EQ(allocator.pages(b), Pages({3, 0, 1, 2, 4}));
    allocator.truncate(b, 2);
    allocator.extend(b, 3);
    EXPECT_EQ(allocator.pages(b), Pages({3, 0, 1, 2, 4}));
}

TEST(PageAllocator, ForkSharesEveryPage) {
    PageAllocator allocator(8, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 6);
    std::vector<Sequence> children = allocator.fork(a, 3);
    ASSERT_EQ(children.size(), 3u);
    for (Sequence child : children) {
        EXPECT_EQ(allocator.pages(child), Pages({0, 1}));
        EXPECT_EQ(allocator.length(child), 6);
    }
    EXPECT_EQ(allocator.num_free_pages(), 6);
    EXPECT_EQ(allocator.stats().num_shared_pages, 2);
    EXPECT_TRUE(allocator.fork(a, 0).empty());
    EXPECT_EQ(allocator.pages(allocator.fork(allocator.create())[0]), Pages());
    allocator.check_invariants();
}

TEST(PageAllocator, ForksAtAPosition) {
    PageAllocator allocator(8, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 11);
    Sequence b = allocator.fork(a, 1, 5)[0], c = allocator.fork(a, 1, 8)[0], d = allocator.fork(a, 1, 0)[0];
    EXPECT_EQ(allocator.pages(b), Pages({0, 1}));
    EXPECT_EQ(allocator.length(b), 5);
    EXPECT_EQ(allocator.pages(c), Pages({0, 1}));
    EXPECT_EQ(allocator.pages(d), Pages());
    allocator.extend(b, 1);
    EXPECT_EQ(allocator.pages(b), Pages({0, 3}));
    EXPECT_EQ(take_pairs(allocator), Pairs({{1, 3}}));
    EXPECT_EQ(message_of<ValueError>([&] { allocator.fork(a, 1, 12); }),
              "fork: length (12) must be between 0 and the sequence's length (11)");
    allocator.check_invariants();
}

TEST(PageAllocator, ReordersABeam) {
    PageAllocator allocator(16, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 6);
    std::vector<Sequence> beam = allocator.fork(a, 2);
    beam.insert(beam.begin(), a);
    for (Sequence sequence : beam) allocator.extend(sequence, 3);
    allocator.take_copies();
    std::vector<Pages> before;
    for (Sequence sequence : beam) before.push_back(allocator.pages(sequence));
    const int64_t num_free = allocator.num_free_pages();
    std::vector<int32_t> parents = {1, 0, 2};  // a permutation
    allocator.reorder(beam.data(), parents.data(), 3);
    EXPECT_EQ(allocator.pages(beam[0]), before[1]);
    EXPECT_EQ(allocator.pages(beam[1]), before[0]);
    EXPECT_EQ(allocator.pages(beam[2]), before[2]);
    EXPECT_EQ(allocator.num_free_pages(), num_free);
    parents = {1, 1, 1};  // one beam goes on thrice
    allocator.reorder(beam.data(), parents.data(), 3);
    for (Sequence sequence : beam) EXPECT_EQ(allocator.pages(sequence), before[0]);
    EXPECT_EQ(allocator.num_free_pages(), num_free + 4);
    allocator.check_invariants();

    parents = {0, 3, 0};
    EXPECT_EQ(message_of<ValueError>([&] { allocator.reorder(beam.data(), parents.data(), 3); }),
              "reorder: parents[1] (3) must be between 0 and 2");
    beam[2] = beam[0];
    parents = {0, 0, 0};
    EXPECT_EQ(message_of<ValueError>([&] { allocator.reorder(beam.data(), parents.data(), 3); }),
              "reorder: sequence " + std::to_string(static_cast<uint64_t>(a)) +
                  " is given twice (the second time as seqs[2])");
}

TEST(PageAllocator, CopiesAPartlyFilledTailOnlyWhileItIsShared) {
    PageAllocator allocator(8, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 6);
    Sequence b = allocator.fork(a)[0], c = allocator.fork(a)[0];
    allocator.extend(b, 0);
    EXPECT_EQ(allocator.pages(b), Pages({0, 1}));
    allocator.extend(b, 1);
    allocator.extend(c, 3);
    allocator.extend(a, 1);  // the last holder keeps the page
    EXPECT_EQ(allocator.pages(a), Pages({0, 1}));
    EXPECT_EQ(allocator.pages(b), Pages({0, 2}));
    EXPECT_EQ(allocator.pages(c), Pages({0, 3, 4}));
    EXPECT_EQ(take_pairs(allocator), Pairs({{1, 2}, {1, 3}}));
    EXPECT_EQ(take_pairs(allocator), Pairs());
    allocator.check_invariants();
}

TEST(PageAllocator, DoesNotCopyAFullTail) {
    PageAllocator allocator(8, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 8);
    Sequence b = allocator.fork(a)[0];
    allocator.extend(b, 1);
    EXPECT_EQ(allocator.pages(b), Pages({0, 1, 2}));
    EXPECT_EQ(take_pairs(allocator), Pairs());
}

TEST(PageAllocator, CopiesAfterTruncationIntoASharedPage) {
    PageAllocator allocator(8, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 8);
    Sequence b = allocator.fork(a)[0];
    allocator.truncate(b, 2);
    EXPECT_EQ(allocator.pages(b), Pages({0}));
    EXPECT_EQ(allocator.num_free_pages(), 6);
    allocator.extend(b, 1);
    EXPECT_EQ(allocator.pages(b), Pages({2}));
    EXPECT_EQ(take_pairs(allocator), Pairs({{0, 2}}));
    allocator.truncate(b, 0);
    EXPECT_EQ(allocator.pages(b), Pages());
    EXPECT_EQ(allocator.num_free_pages(), 6);
    allocator.check_invariants();
}

TEST(PageAllocator, KeepsTheSourceOfACopyUntilItIsTaken) {
    PageAllocator allocator(2, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 3);
    Sequence b = allocator.fork(a)[0];
    allocator.extend(b, 1);
    allocator.free(a);
    EXPECT_EQ(allocator.num_free_pages(), 0);
    PageAllocatorStats stats = allocator.stats();
    EXPECT_EQ(stats.num_used_pages, 2);
    EXPECT_EQ(stats.num_stored_tokens, 4);
    EXPECT_EQ(stats.waste_percent, 50.0);
    allocator.check_invariants();
    EXPECT_EQ(take_pairs(allocator), Pairs({{0, 1}}));
    EXPECT_EQ(allocator.num_free_pages(), 1);
    allocator.check_invariants();
}

TEST(PageAllocator, DropsTheCopyIntoAReleasedPage) {
    PageAllocator allocator(4, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 3);
    std::vector<Sequence> children = allocator.fork(a, 3);
    for (Sequence child : children) allocator.extend(child, 1);
    allocator.free(a);
    EXPECT_EQ(allocator.num_free_pages(), 0);
    allocator.free(children[0]);
    allocator.truncate(children[1], 0);
    EXPECT_EQ(allocator.num_free_pages(), 2);
    allocator.check_invariants();
    allocator.truncate(children[2], 3);  // keeps its page, and so the copy
    EXPECT_EQ(take_pairs(allocator), Pairs({{0, 3}}));
    EXPECT_EQ(allocator.num_free_pages(), 3);
    allocator.check_invariants();
}

TEST(PageAllocator, ReleasesTheSourceWithTheLastCopyThatReadsIt) {
    PageAllocator allocator(4, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 3);
    Sequence b = allocator.fork(a)[0];
    allocator.extend(b, 1);
    allocator.free(a);
    allocator.free(b);
    EXPECT_EQ(allocator.num_free_pages(), 4);
    EXPECT_EQ(take_pairs(allocator), Pairs());
    allocator.check_invariants();
}

TEST(PageAllocator, ACopyOfAPageStillToBeWrittenReadsItsSource) {
    PageAllocator allocator(8, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 1);
    Sequence b = allocator.fork(a)[0];
    allocator.extend(b, 1);  // 0 -> 1
    Sequence c = allocator.fork(b)[0];
    allocator.extend(c, 1);  // 0 -> 2, as 1 is not written yet
    Sequence d = allocator.fork(c)[0];
    allocator.extend(d, 1);
    allocator.check_invariants();
    allocator.free(b);  // 1 goes, with its copy
    EXPECT_EQ(take_pairs(allocator), Pairs({{0, 3}, {0, 2}}));
    Sequence e = allocator.fork(c)[0];
    allocator.extend(e, 1);
    EXPECT_EQ(take_pairs(allocator), Pairs({{2, 1}}));
    allocator.check_invariants();
}

TEST(PageAllocator, OutOfPagesChangesNothing) {
    PageAllocator allocator(4, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 10);
    Sequence b = allocator.fork(a)[0];
    std::string before = dump(allocator, {a, b});
    EXPECT_EQ(message_of<OutOfPages>([&] { allocator.extend(b, 7); }),
              "extend: needs 3 pages (2 new, 1 copy-on-write), 1 free");
    EXPECT_EQ(message_of<OutOfPages>([&] { allocator.extend(a, kMaxInt32 - 10); }),
              "extend: needs 536870910 pages (536870909 new, 1 copy-on-write), 1 free");
    EXPECT_FALSE(allocator.try_extend(b, 3));
    EXPECT_EQ(dump(allocator, {a, b}), before);
    EXPECT_TRUE(allocator.try_extend(b, 2));
    EXPECT_FALSE(allocator.try_extend(b, 1));
    EXPECT_EQ(take_pairs(allocator), Pairs({{2, 3}}));
    allocator.check_invariants();
}

TEST(PageAllocator, CatchesEveryUseOfAHandleThatIsNotLive) {
    PageAllocator allocator(8, 4), other(8, 4);
    Sequence a = allocator.create();
    Sequence foreign = other.create();
    allocator.free(a);
    Sequence reused = allocator.create();  // the same place in the table
    ASSERT_NE(a, reused);
    uint64_t number = static_cast<uint64_t>(a);
    for (Sequence bad : {a, foreign, Sequence{0}, Sequence{1}, Sequence{~uint64_t{0}}, Sequence{number + 1},
                         Sequence{number | uint64_t{1} << 63},
                         Sequence{static_cast<uint64_t>(reused) + (uint64_t{1} << 28)}}) {
        EXPECT_THROW(allocator.extend(bad, 1), InvalidSequence);
        EXPECT_THROW(allocator.try_extend(bad, 1), InvalidSequence);
        EXPECT_THROW(allocator.fork(bad), InvalidSequence);
        EXPECT_THROW(allocator.truncate(bad, 0), InvalidSequence);
        EXPECT_THROW(allocator.free(bad), InvalidSequence);
        EXPECT_THROW(allocator.length(bad), InvalidSequence);
        EXPECT_THROW(allocator.pages(bad), InvalidSequence);
        EXPECT_THROW(allocator.max_pages(&bad, 1), InvalidSequence);
        EXPECT_THROW(allocator.shared_prefix_len(&bad, 1), InvalidSequence);
    }
    EXPECT_EQ(allocator.length(reused), 0);
    EXPECT_LT(static_cast<uint64_t>(reused), uint64_t{1} << 63);

    std::string handle = std::to_string(number);
    EXPECT_EQ(message_of<InvalidSequence>([&] { allocator.free(a); }),
              "free: sequence " + handle + " was freed");
    EXPECT_EQ(message_of<InvalidSequence>([&] { other.extend(a, 1); }),
              "extend: sequence " + handle + " is not one of this allocator's");
    EXPECT_EQ(message_of<InvalidSequence>([&] { allocator.max_pages(&a, 1); }),
              "max_pages: sequence " + handle + " was freed");
    EXPECT_EQ(message_of<InvalidSequence>([&] { allocator.page_table(&a, 1); }),
              "page_table: sequence " + handle + " was freed");
    allocator.free(reused);
    uint64_t next = static_cast<uint64_t>(reused) + (uint64_t{1} << 28);  // what the place holds now
    EXPECT_THROW(allocator.free(Sequence{next}), InvalidSequence);
    EXPECT_THROW(allocator.free(Sequence{next | uint64_t{1} << 63}), InvalidSequence);
    allocator.check_invariants();
}

TEST(PageAllocator, RefusesValuesOutOfRange) {
    EXPECT_EQ(message_of<ValueError>([] { PageAllocator(0, 4); }),
              "PageAllocator: num_pages (0) must be between 1 and 2147483647");
    EXPECT_EQ(message_of<ValueError>([] { PageAllocator(kMaxInt32 + 1, 4); }),
              "PageAllocator: num_pages (2147483648) must be between 1 and 2147483647");
    EXPECT_EQ(message_of<ValueError>([] { PageAllocator(4, -1); }),
              "PageAllocator: page_size (-1) must be between 1 and 2147483647");
    PageAllocator allocator(4, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 5);
    std::string before = dump(allocator, {a});
    EXPECT_EQ(message_of<ValueError>([&] { allocator.extend(a, -1); }), "extend: n (-1) must be at least 0");
    EXPECT_EQ(message_of<ValueError>([&] { allocator.try_extend(a, kMaxInt32); }),
              "try_extend: n (2147483647) and the sequence's length (5) must add up to at most 2147483647");
    EXPECT_EQ(message_of<ValueError>([&] { allocator.fork(a, -2); }), "fork: n (-2) must be at least 0");
    EXPECT_EQ(message_of<ValueError>([&] { allocator.fork(a, int64_t{1} << 28); }),
              "fork: n (268435456) and the number of sequences (1) must add up to at most 268435456");
    EXPECT_EQ(message_of<ValueError>([&] { allocator.truncate(a, 6); }),
              "truncate: length (6) must be between 0 and the sequence's length (5)");
    EXPECT_EQ(message_of<ValueError>([&] { allocator.truncate(a, -1); }),
              "truncate: length (-1) must be between 0 and the sequence's length (5)");
    EXPECT_EQ(dump(allocator, {a}), before);
}

TEST(PageAllocator, ReachesTheLongestSequence) {
    PageAllocator allocator(2, kMaxInt32);
    Sequence a = allocator.create();
    allocator.extend(a, kMaxInt32 - 1);
    Sequence b = allocator.fork(a)[0];
    allocator.extend(b, 1);
    EXPECT_EQ(allocator.length(b), kMaxInt32);
    EXPECT_THROW(allocator.extend(b, 1), ValueError);
    EXPECT_EQ(allocator.stats().num_stored_tokens, 2 * kMaxInt32 - 1);
    allocator.check_invariants();
}

TEST(PageAllocator, WritesThePageTable) {
    PageAllocator allocator(8, 4);
    Sequence a = allocator.create(), b = allocator.create(), c = allocator.create();
    allocator.extend(a, 3);
    allocator.extend(b, 9);
    std::vector<Sequence> sequences = {b, c, a, b};
    EXPECT_EQ(allocator.max_pages(sequences.data(), 4), 3);
    EXPECT_EQ(allocator.max_pages(nullptr, 0), 0);
    EXPECT_EQ(message_of<ValueError>([&] { allocator.max_pages(sequences.data(), -1); }),
              "max_pages: count (-1) must be at least 0");
    EXPECT_EQ(message_of<ValueError>([&] { allocator.max_pages(sequences.data(), 4, 1); }),
              "max_pages: group (1) must be one of the 1 groups");
    Pages table(16, 77), seq_lens(4, 77);
    EXPECT_EQ(message_of<ValueError>(
                  [&] { allocator.write_page_table(sequences.data(), 4, table.data(), 2, seq_lens.data()); }),
              "page_table: max_pages (2) must be at least 3, the pages of the longest sequence");
    sequences.push_back(Sequence{5});
    EXPECT_THROW(allocator.write_page_table(sequences.data(), 5, table.data(), 4, seq_lens.data()),
                 InvalidSequence);
    EXPECT_THROW(allocator.write_page_table(sequences.data(), -1, table.data(), 4, seq_lens.data()),
                 ValueError);
    EXPECT_EQ(table, Pages(16, 77));
    EXPECT_EQ(seq_lens, Pages(4, 77));
    allocator.write_page_table(sequences.data(), 4, table.data(), 4, seq_lens.data());
    EXPECT_EQ(table, Pages({1, 2, 3, -1, -1, -1, -1, -1, 0, -1, -1, -1, 1, 2, 3, -1}));
    EXPECT_EQ(seq_lens, Pages({9, 0, 3, 9}));
    sequences.pop_back();
    const PageTable made = allocator.page_table(sequences.data(), 4);
    EXPECT_EQ(made.max_pages, 3);
    EXPECT_EQ(made.page_table, Pages({1, 2, 3, -1, -1, -1, 0, -1, -1, 1, 2, 3}));
    EXPECT_EQ(made.seq_lens, seq_lens);
    EXPECT_EQ(allocator.page_table(nullptr, 0).max_pages, 0);
}

TEST(PageAllocator, CountsPagesTokensAndWaste) {
    PageAllocator allocator(10, 4);
    EXPECT_EQ(allocator.stats().waste_percent, 0.0);
    Sequence a = allocator.create();
    allocator.extend(a, 7);
    Sequence b = allocator.fork(a)[0];
    allocator.truncate(b, 5);
    PageAllocatorStats stats = allocator.stats();
    EXPECT_EQ(stats.num_pages, 10);
    EXPECT_EQ(stats.page_size, 4);
    EXPECT_EQ(stats.num_sequences, 2);
    EXPECT_EQ(stats.num_used_pages, 2);
    EXPECT_EQ(stats.num_shared_pages, 2);
    EXPECT_EQ(stats.num_free_pages, 8);
    EXPECT_EQ(stats.num_tokens, 12);
    EXPECT_EQ(stats.num_stored_tokens, 7);
    EXPECT_EQ(stats.waste_percent, 12.5);
    allocator.free(a);
    EXPECT_EQ(allocator.stats().num_stored_tokens, 5);
    EXPECT_EQ(allocator.stats().waste_percent, 37.5);
}

TEST(PageAllocator, Moves) {
    PageAllocator first(4, 4);
    Sequence a = first.create();
    first.extend(a, 5);
    PageAllocator second(std::move(first));
    EXPECT_EQ(second.length(a), 5);
    PageAllocator third(1, 1);
    third = std::move(second);
    EXPECT_EQ(third.pages(a), Pages({0, 1}));
}

}  // namespace
}  // namespace octavo
