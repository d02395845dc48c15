// The prefix cache: each documented behaviour, and random calls against a cache of contents. There, what a
// slot holds stands for everything that the keys and values in it depend on: the namespace and all tokens so
// far.
#include "allocator_testing.h"

#include <octavo/page_allocator.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>

namespace octavo {
namespace {

using Ints = std::vector<int32_t>;

constexpr int64_t kMaxBatch = 16, kMaxPages = 64;

// An allocator with a prefix cache, and a caller that steps it.
struct Engine {
    explicit Engine(int64_t num_pages = 16, int64_t page_size = 4, PrefixCacheOptions options = {})
        : allocator(num_pages, page_size, options) {}

    Sequence create(const Ints& tokens, const std::string& space = "") {
        return allocator.create(tokens.data(), static_cast<int64_t>(tokens.size()), space);
    }
    Sequence pin(const Ints& tokens, const std::string& space = "") {
        return allocator.pin(tokens.data(), static_cast<int64_t>(tokens.size()), space);
    }
    int64_t cached(const Ints& tokens, const std::string& space = "") {
        return allocator.num_cached_tokens(tokens.data(), static_cast<int64_t>(tokens.size()), space);
    }
    void append(Sequence sequence, const Ints& tokens) {
        const auto n = static_cast<int32_t>(tokens.size());
        allocator.step(&sequence, &n, 1, arrays, tokens.data());
    }
    // A sequence of these tokens, whatever of it the cache has.
    Sequence prompt(const Ints& tokens, const std::string& space = "") {
        Sequence sequence = create(tokens, space);
        append(sequence, Ints(tokens.begin() + allocator.length(sequence), tokens.end()));
        return sequence;
    }

    PageAllocator allocator;
    Ints page_table = Ints(kMaxBatch * kMaxPages), seq_lens = Ints(kMaxBatch), copies = Ints(2 * kMaxBatch);
    StepArrays arrays{
        kMaxBatch, {{page_table.data(), kMaxPages, kMaxPages, copies.data(), kMaxBatch}}, seq_lens.data()};
};

Ints counting(int32_t count, int32_t first = 0) {
    Ints tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) token = first++;
    return tokens;
}

TEST(PrefixCache, FindsFullPagesAndThePartOfAnother) {
    Engine engine;
    Sequence a = engine.prompt(counting(10));
    EXPECT_EQ(engine.cached(counting(10)), 8);  // the last page is not full
    EXPECT_EQ(engine.cached(counting(3)), 3);
    EXPECT_EQ(engine.cached(counting(0)), 0);
    EXPECT_EQ(engine.cached({0, 1, 2, 3, 4, 5, 99, 7}), 6);
    EXPECT_EQ(engine.cached({1}), 0);
    Sequence b = engine.create({0, 1, 2, 3, 4, 5, 99});
    EXPECT_EQ(engine.allocator.length(b), 6);
    EXPECT_EQ(engine.allocator.pages(b), Ints({0, 1}));
    engine.append(b, {99});  // copies page 1 first
    EXPECT_EQ(engine.allocator.pages(b), Ints({0, 3}));
    EXPECT_EQ(engine.arrays.num_copies(), 1);
    EXPECT_EQ(engine.copies[0], 1);
    EXPECT_EQ(engine.copies[1], 3);
    engine.append(b, {100});
    EXPECT_EQ(engine.cached({0, 1, 2, 3, 4, 5, 99, 100}), 8);
    PrefixCacheStats stats = engine.allocator.cache_stats();
    EXPECT_EQ(stats.num_stored_pages, 3);
    EXPECT_EQ(stats.num_idle_pages, 0);
    EXPECT_EQ(stats.num_queried_tokens, 17);
    EXPECT_EQ(stats.num_hit_tokens, 6);
    engine.allocator.check_invariants();
    engine.allocator.free(a);
    EXPECT_EQ(engine.cached(counting(10)), 8);
    engine.allocator.check_invariants();
}

TEST(PrefixCache, AStoredPageIsCopiedBeforeItIsWrittenAgain) {
    Engine engine;
    Sequence a = engine.prompt(counting(8));
    ASSERT_EQ(engine.cached(counting(8)), 8);
    engine.allocator.truncate(a, 6);  // nobody else holds page 1, but it may be found
    engine.append(a, {50});
    EXPECT_EQ(engine.allocator.pages(a), Ints({0, 2}));
    EXPECT_EQ(engine.arrays.num_copies(), 1);
    EXPECT_EQ(engine.cached(counting(8)), 8);
    engine.append(a, {51});
    EXPECT_EQ(engine.cached({0, 1, 2, 3, 4, 5, 50, 51}), 8);
    engine.allocator.check_invariants();
}

TEST(PrefixCache, WhatWasTruncatedBeforeTheNextCallIsNotStored) {
    Engine engine;
    Sequence a = engine.create({});
    engine.append(a, counting(8));
    engine.allocator.truncate(a, 5);
    EXPECT_EQ(engine.cached(counting(8)), 4);
    engine.append(a, {70});
    EXPECT_EQ(engine.allocator.pages(a), Ints({0, 1}));  // never stored, so written in place
}

TEST(PrefixCache, KeepsNamespacesApart) {
    Engine engine;
    Sequence a = engine.prompt(counting(8), "alice");
    EXPECT_EQ(engine.cached(counting(8), "alice"), 8);
    EXPECT_EQ(engine.cached(counting(8), "bob"), 0);
    EXPECT_EQ(engine.cached(counting(8)), 0);
    Sequence b = engine.prompt(counting(8), "bob");
    EXPECT_NE(engine.allocator.pages(b), engine.allocator.pages(a));
    engine.allocator.free(a);
    engine.allocator.free(b);
    EXPECT_EQ(engine.cached(counting(8), std::string("bob")), 8);
    for (int i = 0; i < 100; ++i) {  // names that hold nothing leave nothing behind
        engine.allocator.free(engine.create({}, "tenant " + std::to_string(i)));
    }
    engine.allocator.check_invariants();
}

TEST(PrefixCache, EqualPagesBecomeOne) {
    Engine engine;
    Sequence a = engine.create({}), b = engine.create({});
    engine.append(a, counting(9));
    engine.append(b, counting(9));
    EXPECT_EQ(engine.allocator.num_free_pages(), 10);
    engine.append(b, {9});
    EXPECT_EQ(engine.allocator.num_free_pages(), 12);
    EXPECT_EQ(engine.allocator.pages(b), Ints({0, 1, 5}));
    EXPECT_EQ(Ints(engine.page_table.begin(), engine.page_table.begin() + 4), Ints({0, 1, 5, -1}));
    engine.allocator.check_invariants();
}

TEST(PrefixCache, EvictsTheLeastRecentlyUsedAndTheDeepestFirst) {
    PrefixCacheOptions options;
    options.event_capacity = 100;
    Engine engine(6, 4, options);
    Sequence a = engine.prompt(counting(12, 0));
    Sequence b = engine.prompt(counting(12, 100));
    engine.allocator.free(a);  // pages 0 1 2
    engine.allocator.free(b);  // pages 3 4 5
    EXPECT_EQ(engine.allocator.num_free_pages(), 6);
    EXPECT_EQ(engine.allocator.cache_stats().num_idle_pages, 6);
    engine.allocator.free(engine.create(counting(4)));  // page 0 is used once more, after b
    EXPECT_EQ(engine.allocator.take_events().size(), 6u);
    Sequence c = engine.allocator.create();
    Ints evicted;
    for (int i = 0; i < 6; ++i) {
        engine.allocator.extend(c, 4);
        engine.allocator.check_invariants();
        for (const CacheEvent& event : engine.allocator.take_events()) {
            EXPECT_EQ(event.kind, CacheEvent::Kind::evicted);
            evicted.push_back(event.page);
        }
    }
    EXPECT_EQ(evicted, Ints({2, 1, 5, 4, 3, 0}));
    EXPECT_EQ(engine.cached(counting(12)), 0);
    EXPECT_EQ(engine.allocator.cache_stats().num_evicted_pages, 6);
    EXPECT_THROW(engine.allocator.extend(c, 1), OutOfPages);
}

TEST(PrefixCache, PinsUntilUnpinned) {
    Engine engine(4, 4);
    engine.allocator.free(engine.prompt(counting(10)));
    Sequence pin = engine.pin(counting(10));
    EXPECT_EQ(engine.allocator.length(pin), 8);
    EXPECT_EQ(engine.allocator.num_free_pages(), 2);
    Sequence c = engine.allocator.create();
    EXPECT_FALSE(engine.allocator.try_extend(c, 9));
    EXPECT_TRUE(engine.allocator.try_extend(c, 8));
    EXPECT_EQ(engine.cached(counting(10)), 8);
    engine.allocator.unpin(pin);
    EXPECT_THROW(engine.allocator.unpin(pin), InvalidSequence);
    EXPECT_EQ(engine.cached(counting(10)), 8);
    EXPECT_TRUE(engine.allocator.try_extend(c, 8));
    EXPECT_EQ(engine.cached(counting(10)), 0);
    engine.allocator.check_invariants();
}

TEST(PrefixCache, PinsDoNotGrow) {
    Engine engine(4, 4);
    PageAllocator& allocator = engine.allocator;
    allocator.free(engine.prompt(counting(10)));
    const Sequence pin = engine.pin(counting(10));
    const std::string name = "sequence " + std::to_string(static_cast<uint64_t>(pin));
    EXPECT_EQ(message_of<ValueError>([&] { allocator.extend(pin, 1); }),
              "extend: " + name + " is a pin, which cannot grow; fork it");
    const Sequence fork = allocator.fork(pin)[0];
    allocator.extend(fork, 1);
    EXPECT_EQ(allocator.length(fork), 9);
    EXPECT_EQ(allocator.length(pin), 8);
    const std::string other = "sequence " + std::to_string(static_cast<uint64_t>(fork));
    EXPECT_EQ(message_of<ValueError>([&] { allocator.unpin(fork); }),
              "unpin: " + other + " is not a pin; free() ends sequences");
    EXPECT_EQ(allocator.length(fork), 9);
    allocator.unpin(pin);
    const Sequence next = allocator.create();  // in the entry of the pin
    allocator.extend(next, 1);
    allocator.check_invariants();
}

TEST(PrefixCache, LogsWhatARouterNeeds) {
    PrefixCacheOptions options;
    options.hash_key = {1, 2};
    options.event_capacity = 2;
    Engine engine(8, 4, options), twin(8, 4, options);
    Sequence a = engine.prompt(counting(9));
    twin.prompt(counting(12));
    EXPECT_EQ(twin.cached(counting(12)), 12);
    int64_t num_lost = -1;
    EXPECT_TRUE(engine.allocator.take_events().empty());  // the step may still be computed
    EXPECT_EQ(engine.cached({}), 0);                      // as it has been now
    std::vector<CacheEvent> events = engine.allocator.take_events(&num_lost);
    EXPECT_EQ(num_lost, 0);
    ASSERT_EQ(events.size(), 2u);
    EXPECT_EQ(events[0].tokens, counting(4));
    EXPECT_EQ(events[1].tokens, counting(4, 4));
    EXPECT_EQ(events[1].parent_key, events[0].key);
    EXPECT_NE(events[0].key, events[1].key);
    std::vector<CacheEvent> of_twin = twin.allocator.take_events(&num_lost);
    EXPECT_EQ(num_lost, 1);  // the first of three
    ASSERT_EQ(of_twin.size(), 2u);
    EXPECT_EQ(of_twin[0].key, events[1].key);
    EXPECT_TRUE(engine.allocator.take_events().empty());
    engine.allocator.free(a);
}

TEST(PrefixCache, WhoLooksWhileAStepIsComputedStoresNothing) {
    PrefixCacheOptions options;
    options.event_capacity = 8;
    Engine engine(8, 4, options);
    Sequence a = engine.prompt(counting(4));
    engine.append(a, counting(5, 4));
    for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(engine.allocator.cache_stats().num_stored_pages, 1);  // of the step before
        EXPECT_EQ(engine.allocator.take_events().size(), i == 0 ? 1u : 0u);
        engine.allocator.stats();
        engine.allocator.check_invariants();
    }
    engine.allocator.truncate(a, 4);  // the step has failed
    EXPECT_EQ(engine.cached(counting(9)), 4);
    engine.append(a, counting(5, 4));
    engine.allocator.step(nullptr, nullptr, 0, engine.arrays);  // a later step, of nothing
    EXPECT_EQ(engine.allocator.cache_stats().num_stored_pages, 2);
    EXPECT_EQ(engine.allocator.take_events().size(), 1u);
    EXPECT_EQ(engine.cached(counting(9)), 8);
}

TEST(PrefixCache, TokensThatNobodyKnowsAreNotFound) {
    Engine engine;
    Sequence a = engine.create({});
    engine.append(a, counting(4));
    engine.allocator.extend(a, 1);
    engine.append(a, counting(7, 5));
    EXPECT_EQ(engine.cached(counting(12)), 4);
    engine.allocator.truncate(a, 4);
    engine.append(a, counting(8, 4));
    EXPECT_EQ(engine.cached(counting(12)), 12);
    engine.allocator.check_invariants();
}

TEST(PrefixCache, AForkOfCachedPagesGoesOnFindably) {
    Engine engine;
    Sequence a = engine.prompt(counting(6));
    Sequence b = engine.allocator.fork(a)[0];
    engine.append(a, {6, 7});
    engine.append(b, {60, 70});
    EXPECT_EQ(engine.cached(counting(8)), 8);
    EXPECT_EQ(engine.cached({0, 1, 2, 3, 4, 5, 60, 70}), 8);
    engine.allocator.check_invariants();
}

// A sequence whose two full pages cannot be stored yet, since a copy is still to be written to the first one.
Sequence with_pending_copy(Engine& engine) {
    StepArrays arrays(1, {{engine.page_table.data(), kMaxPages, kMaxPages}}, engine.seq_lens.data());
    const Sequence sequence = engine.allocator.fork(engine.prompt({0, 1}))[0];
    const Ints tokens = counting(6, 2);
    const int32_t n = 6;
    engine.allocator.step(&sequence, &n, 1, arrays, tokens.data());
    return sequence;
}

TEST(PrefixCache, AForkStoresThePagesThatItsParentCouldNot) {
    Engine engine;
    Sequence a = with_pending_copy(engine);
    engine.allocator.fork(a);
    engine.allocator.take_copies();
    engine.allocator.truncate(a, 0);
    EXPECT_EQ(engine.cached(counting(8)), 8);
    engine.allocator.check_invariants();
}

TEST(PrefixCache, ABeamStoresThePagesThatItsParentCouldNot) {
    Engine engine;
    const std::vector<Sequence> beam = {with_pending_copy(engine), engine.allocator.create()};
    const Ints parents = {0, 0};
    engine.allocator.reorder(beam.data(), parents.data(), 2);
    engine.allocator.take_copies();
    engine.allocator.truncate(beam[0], 0);
    EXPECT_EQ(engine.cached(counting(8)), 8);
    engine.allocator.check_invariants();
}

// The last query of `a` sees both of its pages in group 1, the next one neither: `b` alone holds the second
// one then, which is stored before that and has to be copied.
TEST(PrefixCache, ACopyOfAPageThatAStepStoresIsPlanned) {
    for (const int64_t num_pages : {3, 4}) {
        PageAllocator allocator({{16, 4}, {num_pages, 4, 0}}, PrefixCacheOptions{});
        Ints tables[2] = {Ints(2 * 8), Ints(2 * 8)}, seq_lens(2);
        StepArrays arrays(2, {{tables[0].data(), 8, 8}, {tables[1].data(), 8, 8}}, seq_lens.data());
        Sequence first = allocator.create(nullptr, 0);
        const Ints tokens = counting(8);
        int32_t n[] = {2, 6};
        allocator.step(&first, &n[0], 1, arrays, &tokens[0]);
        Sequence a = allocator.fork(first)[0];
        allocator.step(&a, &n[1], 1, arrays, &tokens[2]);
        const std::vector<Sequence> both = {a, allocator.fork(a, 1, 6)[0]};  // while a copy is pending
        allocator.take_copies(0);
        allocator.take_copies(1);
        EXPECT_EQ(allocator.pages(both[1], 1), Ints({1, 2}));
        // A new page and the copy, for the first page of both.
        EXPECT_EQ(allocator.needed(both.data(), nullptr, 2, 1), 1);
        if (num_pages == 3) {  // a sequence that cannot be copied returns nothing either
            EXPECT_EQ(
                message_of<OutOfPages>(
                    [&] { allocator.step(both.data(), nullptr, 2, arrays, tokens.data()); }),
                "step: 2 of 2 sequences need pages that are not free: seqs[0, 1] need 2, 13 of the 13 free "
                "pages are left in group 0; they need 2, 0 of the 0 free pages are left in group 1");
        } else {
            allocator.step(both.data(), nullptr, 2, arrays, tokens.data());
            const std::vector<PageCopy> copies = allocator.take_copies(1);
            ASSERT_EQ(copies.size(), 1u);
            EXPECT_EQ(copies[0].from, 2);
            EXPECT_EQ(copies[0].to, allocator.pages(both[1], 1)[1]);
            EXPECT_EQ(allocator.num_cached_tokens(tokens.data(), 8), 8);
        }
        allocator.check_invariants();
    }
}

TEST(PrefixCache, BeamsOfTwoNamespacesChangePlaces) {
    Engine engine;
    std::vector<Sequence> beam = {engine.create({}, "x"), engine.create({}, "y")};
    const Ints parents = {1, 0};
    engine.allocator.reorder(beam.data(), parents.data(), 2);
    engine.append(beam[0], counting(4));
    EXPECT_EQ(engine.cached(counting(4), "y"), 4);
    EXPECT_EQ(engine.cached(counting(4), "x"), 0);
    engine.append(beam[1], counting(4));
    EXPECT_EQ(engine.cached(counting(4), "x"), 4);
    engine.allocator.check_invariants();
}

TEST(PrefixCache, CollidingHashesNeverShareAPage) {
    for (int64_t hash_bits : {0, 1, 3, 64, 65}) {
        PrefixCacheOptions options;
        options.hash_bits = hash_bits;
        options.hash_key = {0, 0};
        Engine engine(64, 2, options);
        std::map<Ints, Ints> pages;  // of each prompt
        std::vector<Sequence> sequences;
        for (int32_t i = 0; i < 16; ++i) {  // with 0 bits, all of them collide
            const Ints tokens = {i % 2, i / 2 % 2, i / 4 % 2, i / 8};
            sequences.push_back(engine.prompt(tokens));
            pages[tokens] = engine.allocator.pages(sequences.back());
        }
        std::set<int32_t> last_pages;
        for (const auto& [tokens, held] : pages) {
            last_pages.insert(held.back());
            for (const auto& [other, others] : pages) {
                const bool same_first_page = std::equal(tokens.begin(), tokens.begin() + 2, other.begin());
                EXPECT_EQ(held[0] == others[0], same_first_page);
            }
        }
        EXPECT_EQ(last_pages.size(), 16u);
        // The same tokens below different pages, and in different namespaces, collide as well.
        EXPECT_EQ(engine.cached({0, 0, 1, 1}), 4);
        EXPECT_EQ(engine.cached({0, 0, 1, 1}, "other"), 0);
        engine.allocator.check_invariants();
        for (Sequence sequence : sequences) engine.allocator.free(sequence);
        Sequence all = engine.allocator.create();
        engine.allocator.extend(all, 128);  // evicts every one
        EXPECT_EQ(engine.allocator.cache_stats().num_stored_pages, 0);
        engine.allocator.check_invariants();
    }
}

TEST(PrefixCache, RefusesWhatItCannotDo) {
    PageAllocator plain(4, 4);
    EXPECT_EQ(message_of<ValueError>([&] { plain.create(nullptr, 0); }),
              "create: the allocator was made without a prefix cache");
    EXPECT_EQ(message_of<ValueError>([&] { plain.take_events(); }),
              "take_events: the allocator was made without a prefix cache");
    EXPECT_EQ(
        message_of<ValueError>([] { PageAllocator({{4, 4}, {4, 8}}, PrefixCacheOptions{}); }),
        "PageAllocator: prefix_cache must be off with groups of several page sizes; that of group 1 is 8, "
        "that of group 0 4");
    EXPECT_EQ(message_of<ValueError>([] { PageAllocator({{4, 4, 7}, {4, 4}}, PrefixCacheOptions{}); }),
              "PageAllocator: prefix_cache must be off with a window in group 0; window_left is 7");
    EXPECT_EQ(
        message_of<ValueError>([] { PageAllocator({{1 << 29, 4, -1, 1 << 29}}, PrefixCacheOptions{}); }),
        "PageAllocator: num_pages (536870912) and num_host_pages (536870912) must add up to less than "
        "1073741824 with a prefix cache");
    constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
    EXPECT_EQ(
        message_of<ValueError>([] { PageAllocator({{4, 4}, {4, 4, -1, kHuge}}, PrefixCacheOptions{}); }),
        "PageAllocator: num_host_pages (9223372036854775807) must be between 0 and 2147483647");
    PrefixCacheOptions options;
    options.hash_bits = 129;
    EXPECT_EQ(message_of<ValueError>([&] { PageAllocator(4, 4, options); }),
              "PageAllocator: hash_bits (129) must be between 0 and 128");
    options = {};
    options.event_capacity = -1;
    EXPECT_EQ(message_of<ValueError>([&] { PageAllocator(4, 4, options); }),
              "PageAllocator: event_capacity (-1) must be between 0 and 2147483647");
}

}  // namespace
}  // namespace octavo
