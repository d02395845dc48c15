// The threads that the CPU operators share. Built with ThreadSanitizer, every race is an error.
#include "cpu/thread_pool.h"

#include <octavo/build_info.h>
#include <octavo/error.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace octavo {
namespace {

// Not atomic: what bodies write has to be there, without a race, when parallel_for() returns.
using Counts = std::vector<int>;

Counts count_calls(int64_t count) {
    Counts calls(static_cast<size_t>(count));
    cpu::parallel_for(count, [&](int64_t i) { ++calls[static_cast<size_t>(i)]; });
    return calls;
}

class ThreadPool : public testing::Test {
  protected:
    ThreadPool() { set_num_threads(4); }
};

TEST_F(ThreadPool, calls_each_body_once) {
    for (int64_t count : {0, 1, 2, 3, 64}) {
        for (int round = 0; round < 500; ++round) ASSERT_EQ(count_calls(count), Counts(count, 1)) << count;
    }
}

// Threads spin between calls that follow one another at once, and sleep in longer pauses.
TEST_F(ThreadPool, works_after_pauses) {
    for (int microseconds : {0, 20, 60, 200, 2000}) {
        for (int round = 0; round < 50; ++round) {
            std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
            ASSERT_EQ(count_calls(8), Counts(8, 1)) << microseconds;
        }
    }
}

TEST_F(ThreadPool, serves_callers_at_once_and_bodies_that_call_it) {
    std::atomic<int> num_wrong{0};
    auto call = [&] {
        for (int round = 0; round < 100; ++round) {
            Counts inner(6);
            cpu::parallel_for(6, [&](int64_t i) {
                for (int calls : count_calls(5)) inner[static_cast<size_t>(i)] += calls;
            });
            if (inner != Counts(6, 5)) ++num_wrong;
        }
    };
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) callers.emplace_back(call);
    for (std::thread& caller : callers) caller.join();
    EXPECT_EQ(num_wrong, 0);
}

TEST_F(ThreadPool, throws_what_a_body_throws_and_goes_on) {
    for (int64_t thrower = 0; thrower < 32; ++thrower) {
        std::string message;
        try {
            cpu::parallel_for(32, [&](int64_t i) {
                if (i == thrower) throw std::runtime_error(std::to_string(i));
            });
        } catch (const std::runtime_error& error) {
            message = error.what();
        }
        EXPECT_EQ(message, std::to_string(thrower));
        EXPECT_EQ(count_calls(16), Counts(16, 1));
    }
}

TEST_F(ThreadPool, number_of_threads_may_change) {
    for (int num_threads : {1, 6, 2, 4}) {
        set_num_threads(num_threads);
        EXPECT_EQ(get_num_threads(), num_threads);
        for (int round = 0; round < 50; ++round) ASSERT_EQ(count_calls(24), Counts(24, 1)) << num_threads;
    }
    EXPECT_THROW(set_num_threads(0), ValueError);
    EXPECT_THROW(set_num_threads(65537), ValueError);
    EXPECT_EQ(get_num_threads(), 4);
}

}  // namespace
}  // namespace octavo
