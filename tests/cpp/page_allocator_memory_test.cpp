// Running out of memory inside any call leaves the allocator as it was: every allocation of every call of a
// script fails once.
#include "allocator_testing.h"

#include <octavo/page_allocator.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <new>

namespace {

constexpr int kNever = -1;
int allocations_until_failure = kNever;

}  // namespace

// Not inlined, or GCC sees std::free on what operator new returned and warns.
[[gnu::noinline]] void* operator new(size_t size) {
    if (allocations_until_failure != kNever && allocations_until_failure-- == 0) {
        allocations_until_failure = kNever;
        throw std::bad_alloc();
    }
    if (void* memory = std::malloc(size ? size : 1)) return memory;
    throw std::bad_alloc();
}

[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace octavo {
namespace {

// As dump, with what is on the host.
std::string dump_all(const PageAllocator& allocator, const std::vector<Sequence>& sequences) {
    std::vector<Sequence> on_device;
    for (Sequence sequence : sequences) {
        try {
            allocator.pages(sequence);
            on_device.push_back(sequence);
        } catch (const ValueError&) {
        }
    }
    return dump(allocator, on_device) + std::to_string(allocator.num_free_host_pages());
}

using Script = std::vector<std::function<void()>>;

// Runs each call of the script once for each of its allocations, which fails, and then in peace. Returns how
// many failed.
int fail_every_allocation(PageAllocator& allocator, const std::vector<Sequence>& sequences,
                          const Script& script) {
    int num_failures = 0;
    for (const auto& call : script) {
        const std::string before = dump_all(allocator, sequences);
        for (int succeed = 0;; ++succeed) {
            allocations_until_failure = succeed;
            bool failed = false;
            try {
                call();
            } catch (const std::bad_alloc&) {
                failed = true;
            }
            allocations_until_failure = kNever;
            allocator.check_invariants();
            if (!failed) break;
            ++num_failures;
            EXPECT_EQ(dump_all(allocator, sequences), before);
        }
    }
    return num_failures;
}

// Giving back needs no memory.
void give_all_back(PageAllocator& allocator, const std::vector<Sequence>& sequences) {
    for (Sequence sequence : sequences) {
        allocations_until_failure = 0;
        allocator.truncate(sequence, 0);
        allocator.free(sequence);
        allocations_until_failure = kNever;
    }
    EXPECT_EQ(allocator.num_free_pages(), 64);
    allocator.check_invariants();
}

TEST(PageAllocatorMemory, EveryFailedAllocationLeavesTheStateAsItWas) {
    PageAllocator allocator({{64, 4, -1, 64}});
    std::vector<Sequence> sequences;
    sequences.reserve(64);
    std::vector<PageCopy> copies;
    auto fork = [&](size_t parent, int64_t n) {
        for (Sequence child : allocator.fork(sequences[parent], n)) sequences.push_back(child);
    };
    std::vector<int32_t> page_table(8 * 16), seq_lens(8), step_copies(16);
    StepArrays arrays(8, {{page_table.data(), 16, 16, step_copies.data(), 8}}, seq_lens.data());
    const std::vector<int32_t> parents = {1, 3, 2, 0};
    Transfer transfer;
    const Script script = {
        [&] { sequences.push_back(allocator.create()); },
        [&] { allocator.extend(sequences[0], 6); },
        [&] { fork(0, 5); },
        [&] { allocator.extend(sequences[1], 1); },
        [&] { EXPECT_TRUE(allocator.try_extend(sequences[2], 20)); },
        [&] { fork(2, 3); },
        [&] { allocator.extend(sequences[6], 5); },
        [&] { allocator.truncate(sequences[2], 3); },
        [&] { allocator.extend(sequences[2], 9); },
        [&] { copies = allocator.take_copies(); },
        [&] { sequences.push_back(allocator.create()); },
        [&] { fork(2, 3); },
        [&] { allocator.step(sequences.data(), nullptr, 8, arrays); },
        [&] { allocator.reorder(sequences.data(), parents.data(), 4); },
        [&] { transfer = allocator.preempt(sequences.data(), 3); },
        [&] { allocator.confirm(transfer.id); },
        [&] { transfer = allocator.resume(sequences.data(), 3); },
        [&] { allocator.confirm(transfer.id); },
    };
    EXPECT_GT(fail_every_allocation(allocator, sequences, script), 20);
    EXPECT_EQ(copies.size(), 4u);
    give_all_back(allocator, sequences);
}

TEST(PageAllocatorMemory, EveryFailedAllocationOfThePrefixCacheToo) {
    PrefixCacheOptions options;
    options.event_capacity = 8;
    PageAllocator allocator(64, 4, options);
    std::vector<Sequence> sequences;
    sequences.reserve(64);
    std::vector<int32_t> page_table(8 * 16), seq_lens(8);
    StepArrays arrays(8, {{page_table.data(), 16, 16}}, seq_lens.data());
    const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19};
    const std::string space = "a namespace too long to be stored without an allocation of its own";
    auto append = [&](size_t i, int32_t n) { allocator.step(&sequences[i], &n, 1, arrays, tokens.data()); };
    const Script script = {
        [&] { sequences.push_back(allocator.create(tokens.data(), 9, space)); },
        [&] { append(0, 17); },
        [&] { sequences.push_back(allocator.create(tokens.data(), 19, space)); },
        [&] { append(1, 6); },
        [&] { sequences.push_back(allocator.fork(sequences[1])[0]); },
        [&] { append(2, 3); },
        [&] { sequences.push_back(allocator.pin(tokens.data(), 9, space)); },
        [&] { EXPECT_EQ(allocator.num_cached_tokens(tokens.data(), 19, space), 16); },
        [&] { EXPECT_EQ(allocator.take_events().size(), 5u); },
    };
    EXPECT_GT(fail_every_allocation(allocator, sequences, script), 10);
    give_all_back(allocator, sequences);
}

TEST(PageAllocatorMemory, EveryFailedAllocationOfGroupsWithAPrefixCache) {
    PageAllocator allocator({{64, 4, -1, 64}, {64, 4, 5, 64}}, PrefixCacheOptions{});
    std::vector<Sequence> sequences;
    sequences.reserve(64);
    std::vector<int32_t> page_tables(2 * 8 * 16), seq_lens(8);
    StepArrays arrays(8, {{page_tables.data(), 16, 16}, {page_tables.data() + 8 * 16, 16, 16}},
                      seq_lens.data());
    const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19};
    auto append = [&](size_t i, int32_t n) { allocator.step(&sequences[i], &n, 1, arrays, tokens.data()); };
    Transfer transfer;
    const Script script = {
        [&] { sequences.push_back(allocator.create(tokens.data(), 19)); },
        [&] { append(0, 19); },
        [&] { sequences.push_back(allocator.create(tokens.data(), 19)); },
        [&] { append(1, 6); },
        [&] { sequences.push_back(allocator.fork(sequences[1])[0]); },
        [&] { append(2, 3); },
        [&] { allocator.take_copies(0); },
        [&] { allocator.take_copies(1); },
        [&] { transfer = allocator.preempt(sequences.data(), 3); },
        [&] { allocator.confirm(transfer.id); },
        [&] { EXPECT_EQ(allocator.num_cached_tokens(tokens.data(), 19), 16); },
        [&] { transfer = allocator.resume(sequences.data(), 3); },
        [&] { EXPECT_LT(transfer.copies[0].size(), 6u); },
        [&] { allocator.confirm(transfer.id); },
    };
    EXPECT_GT(fail_every_allocation(allocator, sequences, script), 20);
    give_all_back(allocator, sequences);
}

TEST(PageAllocatorMemory, ConstructionFailsCleanly) {
    for (int succeed = 0; succeed < 24; ++succeed) {
        allocations_until_failure = succeed;
        try {
            PageAllocator allocator({{4, 4}, {4, 4, 3}}, PrefixCacheOptions{});
        } catch (const std::bad_alloc&) {
        }
        allocations_until_failure = kNever;
    }
}

}  // namespace
}  // namespace octavo
