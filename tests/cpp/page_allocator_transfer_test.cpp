// Sequences that leave for host memory and come back, case by case. The prefix cache's model test mixes this
// with everything else, and that of groups with windows.
#include "allocator_testing.h"

#include <octavo/page_allocator.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

namespace octavo {
namespace {

using Pages = std::vector<int32_t>;
using Pairs = std::vector<std::pair<int32_t, int32_t>>;

Pairs pairs_of(const Transfer& transfer, size_t group = 0) {
    Pairs pairs;
    for (PageCopy copy : transfer.copies[group]) pairs.emplace_back(copy.from, copy.to);
    return pairs;
}

struct Engine {
    PageAllocator allocator{{{4, 4, -1, 3}}};

    Transfer preempt(const std::vector<Sequence>& sequences) {
        return allocator.preempt(sequences.data(), static_cast<int64_t>(sequences.size()));
    }
    Transfer resume(const std::vector<Sequence>& sequences) {
        return allocator.resume(sequences.data(), static_cast<int64_t>(sequences.size()));
    }
};

TEST(Transfers, ASequenceLeavesAndComesBack) {
    Engine engine;
    PageAllocator& allocator = engine.allocator;
    Sequence a = allocator.create(), b = allocator.create();
    allocator.extend(a, 10);
    const Transfer out = engine.preempt({a});
    EXPECT_EQ(pairs_of(out), Pairs({{0, 0}, {1, 1}, {2, 2}}));
    EXPECT_EQ(allocator.num_free_pages(), 1);  // not before the copies are made
    EXPECT_EQ(allocator.num_free_host_pages(), 0);
    EXPECT_FALSE(allocator.try_extend(b, 5));
    EXPECT_EQ(message_of<ValueError>([&] { engine.resume({a}); }),
              "resume: sequence " + std::to_string(static_cast<uint64_t>(a)) +
                  " is on its way to the host: confirm() its transfer first");
    allocator.check_invariants();
    allocator.confirm(out.id);
    EXPECT_EQ(allocator.num_free_pages(), 4);
    EXPECT_EQ(allocator.length(a), 10);
    EXPECT_EQ(allocator.stats().num_stored_tokens, 0);
    allocator.extend(b, 5);
    const std::string before = dump(allocator, {b});
    EXPECT_EQ(message_of<OutOfPages>([&] { engine.resume({a}); }), "resume: needs 3 pages, 2 free");
    EXPECT_EQ(dump(allocator, {b}), before);
    allocator.truncate(b, 4);
    const Transfer in = engine.resume({a});
    EXPECT_EQ(in.copies[0].size(), 3u);
    EXPECT_EQ(allocator.num_free_host_pages(), 0);  // still read
    allocator.check_invariants();
    EXPECT_THROW(allocator.pages(a), ValueError);
    allocator.confirm(in.id);
    EXPECT_EQ(allocator.num_free_host_pages(), 3);
    Pages to;
    for (PageCopy copy : in.copies[0]) to.push_back(copy.to);
    EXPECT_EQ(allocator.pages(a), to);
    allocator.extend(a, 1);
    allocator.check_invariants();
}

TEST(Transfers, PagesInFlightOutliveTheirSequences) {
    Engine engine;
    PageAllocator& allocator = engine.allocator;
    Sequence a = allocator.create();
    allocator.extend(a, 12);
    const Transfer out = engine.preempt({a});
    allocator.free(a);
    EXPECT_EQ(allocator.num_free_pages(), 1);
    EXPECT_EQ(allocator.num_free_host_pages(), 0);
    allocator.check_invariants();
    allocator.confirm(out.id);
    EXPECT_EQ(allocator.num_free_pages(), 4);
    EXPECT_EQ(allocator.num_free_host_pages(), 3);

    Sequence b = allocator.create();
    allocator.extend(b, 12);
    allocator.confirm(engine.preempt({b}).id);
    const Transfer in = engine.resume({b});
    allocator.free(b);
    EXPECT_EQ(allocator.num_free_pages(), 1);
    EXPECT_EQ(allocator.num_free_host_pages(), 0);
    allocator.check_invariants();
    allocator.confirm(in.id);
    EXPECT_EQ(allocator.num_free_pages(), 4);
    EXPECT_EQ(allocator.num_free_host_pages(), 3);
    EXPECT_EQ(message_of<ValueError>([&] { allocator.confirm(in.id); }),
              "confirm: transfer (" + std::to_string(in.id) + ") must be one in flight");
}

TEST(Transfers, WhatOthersHoldStaysAndSharesStayShared) {
    PageAllocator allocator({{16, 4, -1, 16}});
    Sequence a = allocator.create();
    allocator.extend(a, 6);
    std::vector<Sequence> both = allocator.fork(a, 2);
    for (Sequence sequence : both) allocator.extend(sequence, 3);
    allocator.take_copies();
    allocator.truncate(a, 4);
    // Page 0 is held by a too; the others are each one's own.
    const Transfer out = allocator.preempt(both.data(), 2);
    EXPECT_EQ(out.copies[0].size(), 4u);
    allocator.confirm(out.id);
    EXPECT_EQ(allocator.num_free_pages(), 15);
    allocator.confirm(allocator.resume(both.data(), 2).id);
    EXPECT_EQ(allocator.pages(both[0])[0], allocator.pages(a)[0]);

    allocator.free(a);
    const Transfer again = allocator.preempt(both.data(), 2);
    EXPECT_EQ(again.copies[0].size(), 5u);  // page 0 once
    allocator.confirm(again.id);
    EXPECT_EQ(allocator.num_free_pages(), 16);
    allocator.confirm(allocator.resume(both.data(), 2).id);
    EXPECT_EQ(allocator.pages(both[0])[0], allocator.pages(both[1])[0]);
    EXPECT_EQ(allocator.stats().num_shared_pages, 1);
    EXPECT_EQ(allocator.num_free_host_pages(), 16);
    allocator.check_invariants();
}

TEST(Transfers, FoundPagesAreFoundAgain) {
    PageAllocator allocator({{8, 4, -1, 8}}, PrefixCacheOptions{});
    std::vector<int32_t> page_table(8), seq_lens(1), tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    StepArrays arrays(1, {{page_table.data(), 8, 8}}, seq_lens.data());
    Sequence a = allocator.create();
    int32_t n = 9;
    allocator.step(&a, &n, 1, arrays, tokens.data());
    const Transfer out = allocator.preempt(&a, 1);
    allocator.confirm(out.id);
    EXPECT_EQ(allocator.num_cached_tokens(tokens.data(), 9), 8);  // idle, and not evicted yet
    Sequence b = allocator.create();
    allocator.extend(b, 32);
    allocator.free(b);
    EXPECT_EQ(allocator.num_cached_tokens(tokens.data(), 9), 0);
    const Transfer in = allocator.resume(&a, 1);
    EXPECT_EQ(allocator.num_cached_tokens(tokens.data(), 9), 0);  // not there yet
    allocator.confirm(in.id);
    EXPECT_EQ(allocator.num_cached_tokens(tokens.data(), 9), 8);
    allocator.check_invariants();
}

TEST(Transfers, RefuseAndChangeNothing) {
    Engine engine;
    PageAllocator& allocator = engine.allocator;
    Sequence a = allocator.create();
    allocator.extend(a, 13);
    const std::string before = dump(allocator, {a});
    EXPECT_EQ(message_of<OutOfPages>([&] { engine.preempt({a}); }), "preempt: needs 4 host pages, 3 free");
    EXPECT_EQ(message_of<ValueError>([&] { engine.resume({a}); }),
              "resume: sequence " + std::to_string(static_cast<uint64_t>(a)) + " is not preempted");
    EXPECT_EQ(message_of<ValueError>([&] { engine.preempt({a, a}); }),
              "preempt: sequence " + std::to_string(static_cast<uint64_t>(a)) +
                  " is given twice (the second time as seqs[1])");
    allocator.truncate(a, 2);
    Sequence b = allocator.fork(a)[0];
    allocator.extend(b, 1);
    EXPECT_EQ(message_of<ValueError>([&] { engine.preempt({a}); }),
              "preempt: 1 copies are pending: take and make them first");
    allocator.take_copies();
    allocator.confirm(engine.preempt({a}).id);
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { allocator.extend(a, 1); }, [&] { allocator.try_extend(a, 1); },
             [&] { allocator.truncate(a, 0); }, [&] { allocator.fork(a); }, [&] { allocator.pages(a); },
             [&] { allocator.max_pages(&a, 1); }, [&] { engine.preempt({a}); }}) {
        EXPECT_NE(message_of<ValueError>(call).find(" is preempted: resume() it first"), std::string::npos);
    }
    allocator.free(a);
    EXPECT_EQ(allocator.num_free_host_pages(), 3);
    allocator.check_invariants();
    EXPECT_EQ(message_of<ValueError>([] { PageAllocator({{4, 4, -1, -1}}); }),
              "PageAllocator: num_host_pages (-1) must be between 0 and 2147483647");
}

// An allocator of two groups with a prefix cache, the second one with a window of one page and a bit.
struct CachedEngine {
    PageAllocator allocator{{{8, 4, -1, 8}, {8, 4, 5, 8}}, PrefixCacheOptions{}};
    Pages tables = Pages(2 * 4 * 8), seq_lens = Pages(4);
    StepArrays arrays{4, {{tables.data(), 8, 8}, {tables.data() + 32, 8, 8}}, seq_lens.data()};

    // A sequence of tokens first, first + 1, ..., in steps of a page.
    Sequence prompt(int32_t count, int32_t first = 0) {
        Pages tokens;
        while (static_cast<int32_t>(tokens.size()) < count) tokens.push_back(first++);
        const Sequence sequence = allocator.create(tokens.data(), count);
        for (int64_t length = allocator.length(sequence); length < count;
             length = allocator.length(sequence)) {
            const auto n = static_cast<int32_t>(std::min<int64_t>(4 - length % 4, count - length));
            allocator.step(&sequence, &n, 1, arrays, tokens.data() + length);
            for (int64_t group : {0, 1}) allocator.take_copies(group);
        }
        return sequence;
    }
};

TEST(Transfers, WhatTheCacheStillHasNeedsNoCopy) {
    CachedEngine engine;
    PageAllocator& allocator = engine.allocator;
    const Sequence a = engine.prompt(18);
    const Pages pages = allocator.pages(a), windowed = allocator.pages(a, 1);
    EXPECT_EQ(windowed[0], -1);
    const Transfer out = allocator.preempt(&a, 1);
    EXPECT_EQ(out.copies[0].size(), 5u);
    allocator.confirm(out.id);
    EXPECT_EQ(allocator.num_free_pages(), 8);

    Transfer in = allocator.resume(&a, 1);
    EXPECT_EQ(in.copies[0].size(), 1u);  // the last page, which is not full
    EXPECT_EQ(in.copies[1].size(), 1u);
    EXPECT_EQ(allocator.num_free_host_pages(), 7);  // that one is read
    allocator.check_invariants();
    allocator.confirm(in.id);
    EXPECT_EQ(allocator.num_free_host_pages(), 8);
    EXPECT_TRUE(std::equal(pages.begin(), pages.end() - 1, allocator.pages(a).begin()));
    EXPECT_TRUE(std::equal(windowed.begin(), windowed.end() - 1, allocator.pages(a, 1).begin()));
    allocator.check_invariants();

    // Others need pages meanwhile: the deepest are gone first, and come from the host.
    allocator.confirm(allocator.preempt(&a, 1).id);
    const Sequence b = allocator.create();
    allocator.extend(b, 5 * 4);
    allocator.truncate(b, 4);
    EXPECT_EQ(allocator.num_free_pages(), 7);
    in = allocator.resume(&a, 1);
    EXPECT_EQ(in.copies[0].size(), 2u);
    EXPECT_LE(in.copies[1].size(), 3u);
    allocator.check_invariants();
    allocator.confirm(in.id);
    EXPECT_EQ(allocator.num_free_pages(), 2);
    allocator.check_invariants();

    // Too few pages, with what is intact among the free ones.
    allocator.confirm(allocator.preempt(&a, 1).id);
    allocator.extend(b, 3 * 4);
    const std::string before = dump(allocator, {b});
    EXPECT_EQ(message_of<OutOfPages>([&] { allocator.resume(&a, 1); }),
              "resume: needs 5 pages, 4 free in group 0");
    EXPECT_EQ(dump(allocator, {b}), before);
    allocator.check_invariants();
    allocator.free(a);
    EXPECT_EQ(allocator.num_free_host_pages(), 8);
}

}  // namespace
}  // namespace octavo
