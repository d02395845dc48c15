// PageAllocator::step, case by case. The model test compares it with single calls over random batches.
#include "allocator_testing.h"

#include <octavo/page_allocator.h>

#include <gtest/gtest.h>

#include <limits>

namespace octavo {
namespace {

using Ints = std::vector<int32_t>;

constexpr int32_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// The arrays of a caller, for a batch of up to 3 sequences of up to 4 pages and 2 copies.
struct Caller {
    Ints page_table = Ints(12, 77), seq_lens = Ints(3, 77), cu_seqlens_q = Ints(4, 77), copies = Ints(4, 77);
    StepArrays arrays{3, {{page_table.data(), 4, 4, copies.data(), 2}}, seq_lens.data(), cu_seqlens_q.data()};

    void step(PageAllocator& allocator, const std::vector<Sequence>& sequences, const Ints& n) {
        allocator.step(sequences.data(), n.data(), static_cast<int64_t>(sequences.size()), arrays);
    }
    std::vector<Ints> seen() const { return {page_table, seq_lens, cu_seqlens_q, copies}; }
};

TEST(Step, ExtendsAndWrites) {
    PageAllocator allocator(8, 4);
    Caller caller;
    EXPECT_EQ(caller.page_table, Ints(12, -1));
    EXPECT_EQ(caller.seq_lens, Ints(3, 0));
    EXPECT_EQ(caller.cu_seqlens_q, Ints(4, 0));
    Sequence a = allocator.create(), b = allocator.create();
    caller.step(allocator, {a, b}, {6, 3});
    EXPECT_EQ(caller.page_table, Ints({0, 1, -1, -1, 2, -1, -1, -1, -1, -1, -1, -1}));
    EXPECT_EQ(caller.seq_lens, Ints({6, 3, 0}));
    EXPECT_EQ(caller.cu_seqlens_q, Ints({0, 6, 9, 9}));
    caller.step(allocator, {b}, {2});  // fewer rows: the others are padding again
    EXPECT_EQ(caller.page_table, Ints({2, 3, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}));
    EXPECT_EQ(caller.seq_lens, Ints({5, 0, 0}));
    EXPECT_EQ(caller.cu_seqlens_q, Ints({0, 2, 2, 2}));
    allocator.step(nullptr, nullptr, 0, caller.arrays);
    EXPECT_EQ(caller.page_table, Ints(12, -1));
    EXPECT_EQ(caller.cu_seqlens_q, Ints(4, 0));
    caller.step(allocator, {a}, {0});
    EXPECT_EQ(allocator.length(a), 6);
    EXPECT_EQ(caller.seq_lens, Ints({6, 0, 0}));
}

TEST(Step, HandsOverTheCopies) {
    PageAllocator allocator(8, 4);
    Caller caller;
    Sequence a = allocator.create();
    allocator.extend(a, 6);
    std::vector<Sequence> beams = allocator.fork(a, 2);
    beams.push_back(a);
    caller.step(allocator, beams, {1, 1, 1});
    EXPECT_EQ(caller.arrays.num_copies(), 2);
    EXPECT_EQ(caller.copies, Ints({1, 2, 1, 3}));
    EXPECT_EQ(caller.page_table, Ints({0, 2, -1, -1, 0, 3, -1, -1, 0, 1, -1, -1}));
    EXPECT_TRUE(allocator.take_copies().empty());
    caller.step(allocator, beams, {1, 1, 1});
    EXPECT_EQ(caller.arrays.num_copies(), 0);
}

TEST(Step, LeavesCopiesPendingWhereThereIsNoArrayForThem) {
    PageAllocator allocator(8, 4);
    Ints page_table(8), seq_lens(2);
    StepArrays arrays(2, {{page_table.data(), 4, 4}}, seq_lens.data());
    Sequence a = allocator.create();
    allocator.extend(a, 1);
    std::vector<Sequence> both = {a, allocator.fork(a)[0]};
    allocator.step(both.data(), nullptr, 2, arrays);  // one token each
    EXPECT_EQ(seq_lens, Ints({2, 2}));
    EXPECT_EQ(arrays.num_copies(), 0);
    EXPECT_EQ(allocator.take_copies().size(), 1u);
}

TEST(Step, RowsFollowEveryChangeOfPages) {
    PageAllocator allocator(16, 4);
    Caller caller;
    Sequence a = allocator.create(), b = allocator.create();
    auto expect_rows = [&](const std::vector<Sequence>& sequences) {
        caller.step(allocator, sequences, Ints(sequences.size(), 0));
        Ints table(12, -1), lens(3, 0);
        allocator.write_page_table(sequences.data(), static_cast<int64_t>(sequences.size()), table.data(), 4,
                                   lens.data());
        EXPECT_EQ(caller.page_table, table);
        EXPECT_EQ(caller.seq_lens, lens);
    };
    allocator.extend(a, 9);
    expect_rows({a, b});
    expect_rows({b, a});  // other rows
    allocator.truncate(a, 5);
    allocator.extend(b, 4);  // takes the page that a gave back
    allocator.extend(a, 8);
    expect_rows({b, a});
    allocator.free(b);
    b = allocator.create();  // the same entry of the table
    expect_rows({b, a});
    allocator.extend(b, 1);
    Sequence c = allocator.fork(b)[0];
    expect_rows({b, a, c});
    allocator.extend(b, 1);  // copy on write
    expect_rows({b, a, c});
}

TEST(Step, WritesOnlyWhatHasChanged) {
    PageAllocator allocator(16, 4);
    Caller caller;
    Sequence a = allocator.create();
    caller.step(allocator, {a}, {4});
    caller.page_table[0] = 55;
    caller.step(allocator, {a}, {1});
    EXPECT_EQ(caller.page_table[0], 55);
    EXPECT_EQ(caller.page_table[1], 1);
    caller.arrays.reset();
    EXPECT_EQ(caller.page_table, Ints(12, -1));
    caller.step(allocator, {a}, {1});
    EXPECT_EQ(caller.page_table[0], 0);
}

TEST(Step, ArraysServeOneAllocatorAfterAnother) {
    Caller caller;
    PageAllocator first(8, 4), second(8, 4);
    Sequence a = first.create(), b = second.create(), c = second.create();
    second.extend(c, 1);
    caller.step(first, {a}, {5});
    caller.step(second, {b}, {5});
    EXPECT_EQ(caller.page_table, Ints({1, 2, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}));
}

TEST(Step, WritesOneTableForEachGroup) {
    PageAllocator allocator({{8, 4}, {8, 2}});
    Ints wide(8), narrow(8), seq_lens(2), copies(4), more_copies(4);
    StepArrays arrays(2,
                      {{wide.data(), 4, 4, copies.data(), 2}, {narrow.data(), 4, 4, more_copies.data(), 2}},
                      seq_lens.data());
    Sequence a = allocator.create();
    int32_t n = 5;
    allocator.step(&a, &n, 1, arrays);
    EXPECT_EQ(wide, Ints({0, 1, -1, -1, -1, -1, -1, -1}));
    EXPECT_EQ(narrow, Ints({0, 1, 2, -1, -1, -1, -1, -1}));
    std::vector<Sequence> both = {a, allocator.fork(a)[0]};
    allocator.step(both.data(), nullptr, 2, arrays);
    EXPECT_EQ(wide, Ints({0, 2, -1, -1, 0, 1, -1, -1}));
    EXPECT_EQ(narrow, Ints({0, 1, 3, -1, 0, 1, 2, -1}));
    EXPECT_EQ(copies, Ints({1, 2, 0, 0}));
    EXPECT_EQ(more_copies, Ints({2, 3, 0, 0}));
    EXPECT_EQ(arrays.num_copies(0), 1);
    EXPECT_EQ(arrays.num_copies(1), 1);
    EXPECT_EQ(message_of<ValueError>([&] { arrays.num_copies(2); }),
              "num_copies: group (2) must be one of the 2 groups");
    EXPECT_EQ(message_of<OutOfPages>([&] { allocator.extend(a, 11); }),
              "extend: needs 6 pages (6 new, 0 copy-on-write), 4 free in group 1");
    EXPECT_THROW(allocator.pages(a, 2), ValueError);
    allocator.check_invariants();
}

TEST(Step, SaysWhereEachNewTokenIs) {
    PageAllocator allocator({{8, 4}, {9, 2}});
    Ints wide(8), narrow(16), seq_lens(2), positions(6, 77), slots(6, 77);
    std::vector<int64_t> last_rows(2, 77), more_slots(6, 77);
    StepArrays arrays(2, {{wide.data(), 4, 4}, {narrow.data(), 8, 8}}, seq_lens.data(), nullptr,
                      {6, positions.data(), last_rows.data(), {slots.data(), more_slots.data()}});
    EXPECT_EQ(positions, Ints(6, 0));
    EXPECT_EQ(slots, Ints(6, -1));
    EXPECT_EQ(last_rows, std::vector<int64_t>(2, 0));
    Sequence a = allocator.create(), b = allocator.create();
    allocator.extend(b, 1);  // page 0 of both groups
    std::vector<Sequence> both = {a, b};
    Ints n = {5, 1};
    allocator.step(both.data(), n.data(), 2, arrays);
    EXPECT_EQ(positions, Ints({0, 1, 2, 3, 4, 1}));
    EXPECT_EQ(last_rows, std::vector<int64_t>({4, 5}));
    EXPECT_EQ(slots, Ints({4, 5, 6, 7, 8, 1}));
    EXPECT_EQ(more_slots, std::vector<int64_t>({2, 3, 4, 5, 6, 1}));
    n = {0, 2};
    allocator.step(both.data(), n.data(), 2, arrays);
    EXPECT_EQ(positions, Ints({2, 3, 0, 0, 0, 0}));
    EXPECT_EQ(last_rows, std::vector<int64_t>({0, 1}));
    EXPECT_EQ(slots, Ints({2, 3, -1, -1, -1, -1}));
    allocator.step(&a, nullptr, 1, arrays);  // fewer rows
    EXPECT_EQ(positions, Ints({5, 0, 0, 0, 0, 0}));
    EXPECT_EQ(last_rows, std::vector<int64_t>({0, 0}));
    const Ints before = {seq_lens[0], slots[0]};
    n = {6, 1};
    EXPECT_EQ(message_of<ValueError>([&] { allocator.step(both.data(), n.data(), 2, arrays); }),
              "step: there are 7 new tokens, but the arrays have max_tokens (6) rows for them");
    EXPECT_EQ(Ints({seq_lens[0], slots[0]}), before);
    EXPECT_EQ(message_of<ValueError>([&] {
                  StepArrays(2, {{wide.data(), 4, 4}}, seq_lens.data(), nullptr,
                             {6, {}, {}, {slots.data(), more_slots.data()}});
              }),
              "StepArrays: slot_mapping must have an array for each of the 1 page tables; got 2");
}

TEST(Step, RowsLieOneBehindTheOtherUnlessTheirStrideIsGiven) {
    PageAllocator allocator(4, 4);
    const std::vector<Sequence> both = {allocator.create(), allocator.create()};
    Ints page_table(8), reversed(8), seq_lens(2);
    PageTableArrays contiguous, upwards;
    contiguous.page_table = page_table.data();
    upwards.page_table = reversed.data() + 4;
    contiguous.max_pages = upwards.max_pages = 4;
    upwards.row_stride = -4;
    StepArrays arrays(2, {contiguous}, seq_lens.data()), others(2, {upwards}, seq_lens.data());
    allocator.step(both.data(), nullptr, 2, arrays);
    EXPECT_EQ(page_table, Ints({0, -1, -1, -1, 1, -1, -1, -1}));
    allocator.step(both.data(), nullptr, 2, others);
    EXPECT_EQ(reversed, Ints({1, -1, -1, -1, 0, -1, -1, -1}));
    StepArrays one(1, {{page_table.data(), 4, 1}}, seq_lens.data());  // whose stride does not matter
    StepArrays none(0, {{}}, nullptr);
}

TEST(Step, RefusesArraysThatCannotHoldTheirRows) {
    Ints page_table(8), seq_lens(2);
    auto refused = [&](int64_t max_batch, PageTableArrays table, int32_t* lens) {
        return message_of<ValueError>([&] { StepArrays(max_batch, {table}, lens); });
    };
    for (int32_t row_stride : {1, 3, -1, -3}) {
        EXPECT_EQ(
            refused(2, {page_table.data(), 4, row_stride}, seq_lens.data()),
            "StepArrays: row_stride (" + std::to_string(row_stride) +
                ") must be at least max_pages (4) in magnitude, so that rows lie apart, or 0 where they "
                "are contiguous");
    }
    EXPECT_EQ(refused(2, {nullptr, 4, 4}, seq_lens.data()), "StepArrays: page_table must not be null");
    EXPECT_EQ(refused(2, {page_table.data(), 4, 4}, nullptr), "StepArrays: seq_lens must not be null");
    EXPECT_EQ(refused(2, {page_table.data(), 4, 4, page_table.data(), -1}, seq_lens.data()),
              "StepArrays: max_copies (-1) must be at least 0");
    EXPECT_EQ(refused(int64_t{1} << 62, {page_table.data(), 4, 4}, seq_lens.data()),
              "StepArrays: max_batch (4611686018427387904) must be at most 268435456");
}

TEST(Step, TakesNoArrayOfIntegersForNull) {
    const IntegerArray none = nullptr;
    EXPECT_FALSE(none.has_data());
}

TEST(Step, NumbersOfNewTokensMayLieInItsArrays) {
    PageAllocator allocator(16, 4);
    Ints page_table(16), seq_lens(2), cu_seqlens_q(3), positions(8), slots(8);
    StepArrays arrays(2, {{page_table.data(), 8, 8}}, seq_lens.data(), cu_seqlens_q.data(),
                      {8, positions.data(), {}, {slots.data()}});
    const std::vector<Sequence> both = {allocator.create(), allocator.create()};
    const Ints n = {3, 1};
    allocator.step(both.data(), n.data(), 2, arrays);
    allocator.step(both.data(), seq_lens.data(), 2, arrays);  // as many as there are
    EXPECT_EQ(seq_lens, Ints({6, 2}));
    EXPECT_EQ(cu_seqlens_q, Ints({0, 3, 4}));
    EXPECT_EQ(positions, Ints({3, 4, 5, 1, 0, 0, 0, 0}));
    EXPECT_EQ(slots, Ints({3, 8, 9, 5, -1, -1, -1, -1}));
}

TEST(Step, RefusesSlotsThatDoNotFitInTheirKindOfIntegers) {
    PageAllocator allocator(3, kMaxInt32);
    Ints page_table(3), seq_lens(1), narrow(4);
    std::vector<int64_t> wide(4);
    StepArrays refused(1, {{page_table.data(), 3, 3}}, seq_lens.data(), nullptr,
                       {4, {}, {}, {narrow.data()}});
    StepArrays taken(1, {{page_table.data(), 3, 3}}, seq_lens.data(), nullptr, {4, {}, {}, {wide.data()}});
    Sequence first = allocator.create(), second = allocator.create();
    EXPECT_EQ(message_of<ValueError>([&] { allocator.step(&second, nullptr, 1, refused); }),
              "step: slot_mapping must be int64 for 6442450941 slots; it is int32");
    EXPECT_EQ(allocator.length(second), 0);
    allocator.extend(first, kMaxInt32 - 1);
    allocator.step(&second, nullptr, 1, taken);
    EXPECT_EQ(wide, std::vector<int64_t>({kMaxInt32, -1, -1, -1}));
}

TEST(Needed, CountsWhatAStepTakes) {
    PageAllocator allocator(4, 4);
    Sequence a = allocator.create();
    allocator.extend(a, 6);
    std::vector<Sequence> all = allocator.fork(a, 2);
    all.push_back(a);
    EXPECT_EQ(allocator.needed(all.data(), nullptr, 3), 2);  // the last one keeps the page
    EXPECT_EQ(allocator.needed(all.data(), nullptr, 1), 1);
    Ints n = {0, 0, 2};
    EXPECT_EQ(allocator.needed(all.data(), n.data(), 3), 1);
    n = {100, 1, kMaxInt32 - 6};  // far more than there are, and nothing is set aside for them
    EXPECT_EQ(allocator.needed(all.data(), n.data(), 3), 26 + 1 + (kMaxInt32 / 4 + 1 - 2));
    EXPECT_EQ(allocator.needed(nullptr, nullptr, 0), 0);
    EXPECT_EQ(allocator.num_free_pages(), 2);
    EXPECT_TRUE(allocator.take_copies().empty());
    allocator.check_invariants();
    all.push_back(a);
    EXPECT_EQ(message_of<ValueError>([&] { allocator.needed(all.data(), nullptr, 4); }),
              "needed: sequence " + std::to_string(static_cast<uint64_t>(a)) +
                  " is given twice (the second time as seqs[3])");
    EXPECT_EQ(message_of<ValueError>([&] { allocator.needed(all.data(), nullptr, 1, 1); }),
              "needed: group (1) must be one of the 1 groups");
}

TEST(Step, SaysWhichDoNotFit) {
    PageAllocator allocator(4, 4);
    Caller caller;
    Sequence a = allocator.create(), b = allocator.create(), c = allocator.create();
    caller.step(allocator, {a, b}, {3, 3});
    const std::vector<Ints> seen = caller.seen();
    const std::string before = dump(allocator, {a, b, c});
    try {
        caller.step(allocator, {a, b, c}, {5, 10, 4});
        FAIL();
    } catch (const OutOfPages& error) {
        EXPECT_EQ(error.indices, std::vector<int64_t>({1}));
        EXPECT_STREQ(error.what(),
                     "step: 1 of 3 sequences needs pages that are not free: seqs[1] needs 3, 0 of the 2 free "
                     "pages are left");
    }
    EXPECT_EQ(caller.seen(), seen);
    EXPECT_EQ(dump(allocator, {a, b, c}), before);
    caller.step(allocator, {a, c}, {5, 4});
    EXPECT_EQ(allocator.num_free_pages(), 0);
}

TEST(Step, FitsWithoutThoseThatDoNot) {
    PageAllocator allocator({{5, 1, 0}});  // a window of the last token alone
    Caller caller;
    Sequence a = allocator.create(), b = allocator.create(), c = allocator.create();
    caller.step(allocator, {a}, {4});
    const std::string before = dump(allocator, {a, b, c});
    try {  // a would return its pages if it grew; 100 more tokens do not fit
        caller.step(allocator, {b, a, c}, {3, 100, 1});
        FAIL();
    } catch (const OutOfPages& error) {
        EXPECT_EQ(error.indices, std::vector<int64_t>({0, 1}));
    }
    EXPECT_EQ(dump(allocator, {a, b, c}), before);
    caller.step(allocator, {c}, {1});
    EXPECT_EQ(allocator.length(c), 1);
}

TEST(Step, RefusesAndChangesNothing) {
    PageAllocator allocator(8, 4);
    Caller caller;
    Sequence a = allocator.create(), b = allocator.create(), gone = allocator.create();
    allocator.free(gone);
    caller.step(allocator, {a, b}, {3, 1});
    std::vector<Sequence> forks = allocator.fork(a, 3);
    const std::vector<Ints> seen = caller.seen();
    const std::string before = dump(allocator, {a, b});
    EXPECT_EQ(message_of<ValueError>([&] { caller.step(allocator, {a, b, a}, {1, 1, 1}); }),
              "step: sequence " + std::to_string(static_cast<uint64_t>(a)) +
                  " is given twice (the second time as seqs[2])");
    EXPECT_EQ(message_of<ValueError>([&] { caller.step(allocator, {a, b}, {1, -1}); }),
              "step: num_new_tokens[1] (-1) must be at least 0");
    EXPECT_EQ(message_of<ValueError>([&] { caller.step(allocator, {a}, {kMaxInt32}); }),
              "step: num_new_tokens[0] (2147483647) and the sequence's length (3) must add up to at most "
              "2147483647");
    EXPECT_EQ(
        message_of<ValueError>([&] { caller.step(allocator, {a, b, forks[0], forks[1]}, {1, 1, 1, 1}); }),
        "step: there are 4 sequences, but the arrays have max_batch (3) rows");
    EXPECT_EQ(message_of<ValueError>([&] { caller.step(allocator, {a}, {14}); }),
              "step: page_table's max_pages (4) must be at least 5, the pages of the longest sequence");
    EXPECT_THROW(caller.step(allocator, {a, gone}, {1, 1}), InvalidSequence);
    Sequence other = allocator.fork(b)[0];
    allocator.extend(other, 1);  // a pending copy; two more are too many
    EXPECT_EQ(message_of<ValueError>([&] { caller.step(allocator, {forks[0], forks[1]}, {1, 1}); }),
              "step: copies' max_copies (2) must be at least 3");
    allocator.free(other);
    EXPECT_EQ(caller.seen(), seen);
    EXPECT_EQ(dump(allocator, {a, b}).substr(0, 60), before.substr(0, 60));
    allocator.check_invariants();
    PageAllocator two({{8, 4}, {8, 4}});
    EXPECT_EQ(message_of<ValueError>([&] { caller.step(two, {}, {}); }),
              "step: the arrays have 1 page tables, but there are 2 groups");
}

}  // namespace
}  // namespace octavo
