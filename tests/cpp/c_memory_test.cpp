// The C interface where memory runs out: no function throws.
#include <octavo/octavo.h>
#include <octavo/version.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

namespace {

constexpr int kNever = -1;
int allocations_until_failure = kNever;

}  // namespace

// Not inlined, or GCC sees std::free on what operator new returned and warns.
[[gnu::noinline]] void* operator new(size_t size) {
    if (allocations_until_failure == 0) throw std::bad_alloc();
    if (allocations_until_failure != kNever) --allocations_until_failure;
    if (void* memory = std::malloc(size ? size : 1)) return memory;
    throw std::bad_alloc();
}

[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

TEST(CMemory, TheVersionNeedsNone) {
    allocations_until_failure = 0;
    const char* version = octavo_version();
    allocations_until_failure = kNever;
    EXPECT_STREQ(version, OCTAVO_VERSION);
}

// From the first allocation that fails on, all fail, that of the message included.
TEST(CMemory, EveryAllocationOfACallMayFail) {
    int num_failures = 0;
    octavo_page_allocator* allocator = nullptr;
    octavo_sequence sequence = 0;
    for (int succeed = 0;; ++succeed) {
        allocations_until_failure = succeed;
        octavo_status status = octavo_page_allocator_new(8, 16, &allocator);
        if (status == OCTAVO_OK) status = octavo_page_allocator_create(allocator, &sequence);
        if (status == OCTAVO_OK) status = octavo_page_allocator_extend(allocator, sequence, 40);
        allocations_until_failure = kNever;
        if (status == OCTAVO_OK) break;
        EXPECT_EQ(status, OCTAVO_OUT_OF_MEMORY);
        ++num_failures;
        octavo_page_allocator_delete(allocator);
        allocator = nullptr;
    }
    EXPECT_GT(num_failures, 3);
    EXPECT_EQ(octavo_page_allocator_num_free_pages(allocator), 5);
    octavo_page_allocator_delete(allocator);
}

}  // namespace
