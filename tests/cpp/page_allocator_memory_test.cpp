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

TEST(PageAllocatorMemory, EveryFailedAllocationLeavesTheStateAsItWas) {
    PageAllocator allocator(64, 4);
    std::vector<Sequence> sequences;
    sequences.reserve(64);
    std::vector<PageCopy> copies;
    auto fork = [&](size_t parent, int64_t n) {
        for (Sequence child : allocator.fork(sequences[parent], n)) sequences.push_back(child);
    };
    std::vector<int32_t> page_table(8 * 16), seq_lens(8), step_copies(16);
    StepArrays arrays(8, {{page_table.data(), 16, 16, step_copies.data(), 8}}, seq_lens.data());
    const std::vector<std::function<void()>> script = {
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
    };
    int num_failures = 0;
    for (const auto& call : script) {
        const std::string before = dump(allocator, sequences);
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
            ASSERT_EQ(dump(allocator, sequences), before);
        }
    }
    EXPECT_EQ(copies.size(), 4u);
    EXPECT_GT(num_failures, 10);
    for (Sequence sequence : sequences) {  // giving back needs no memory
        allocations_until_failure = 0;
        allocator.truncate(sequence, 0);
        allocator.free(sequence);
        allocations_until_failure = kNever;
    }
    EXPECT_EQ(allocator.num_free_pages(), 64);
}

TEST(PageAllocatorMemory, ConstructionFailsCleanly) {
    for (int succeed = 0; succeed < 8; ++succeed) {
        allocations_until_failure = succeed;
        try {
            PageAllocator allocator(4, 4);
        } catch (const std::bad_alloc&) {
        }
        allocations_until_failure = kNever;
    }
}

}  // namespace
}  // namespace octavo
