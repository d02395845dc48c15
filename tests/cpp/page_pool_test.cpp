// That check_invariants can fail: the pool compares its counts with the ones it is given.
#include "page_allocator/page_pool.h"

#include "allocator_testing.h"

#include <gtest/gtest.h>

namespace octavo {
namespace {

TEST(PagePool, FindsHoldersThatDoNotAddUp) {
    PagePool pool(4);
    int32_t a = pool.acquire(), b = pool.acquire();
    pool.hold(a);
    pool.hold(a);
    pool.check({3, 1});
    EXPECT_EQ(message_of<Error>([&] { pool.check({2, 1}); }),
              "check_invariants: page 0 has 2 holders, but counts 3");
    pool.release(b);
    pool.check({3, 0});
    EXPECT_EQ(message_of<Error>([&] { pool.check({3, 1}); }),
              "check_invariants: page 1 has 1 holders, but counts 0");
}

TEST(PagePool, UsesNoMemoryForPagesNeverHandedOut) {
    PagePool pool(1 << 26);  // 512 MiB if it were touched
    EXPECT_EQ(pool.num_free(), 1 << 26);
    EXPECT_EQ(pool.acquire(), 0);
    EXPECT_EQ(pool.num_touched(), 1);
}

}  // namespace
}  // namespace octavo
