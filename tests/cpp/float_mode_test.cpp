// The mode of floats that operators and their threads compute in, whatever the calling thread's is.
#include "cpu/float_mode.h"
#include "cpu/thread_pool.h"

#include <octavo/build_info.h>

#include <gtest/gtest.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace octavo {
namespace {

// Makes subnormal numbers count as zero in this thread, as XLA does and torch.set_flush_denormal(True).
// False where this test does not know how.
bool flush_subnormals() {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);  // results and operands
    return true;
#elif defined(__aarch64__)
    uint64_t word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    asm volatile("msr fpcr, %0" : : "r"(word | uint64_t{1} << 24) : "memory");
    return true;
#else
    return false;
#endif
}

bool has_subnormals() {
    volatile float x = 1e-40f;
    return x + x > 0.0f;
}

bool rounds_to_nearest() {
    volatile float x = 1.0f;
    return x + 1e-10f == 1.0f && x - 1e-10f == 1.0f;
}

class FloatMode : public testing::Test {
  protected:
    FloatMode() { std::fegetenv(&environment_); }
    ~FloatMode() override { std::fesetenv(&environment_); }

  private:
    std::fenv_t environment_;
};

TEST_F(FloatMode, is_the_default_until_the_end_of_a_scope) {
    if (!flush_subnormals()) GTEST_SKIP() << "unknown processor";
    std::fesetround(FE_UPWARD);
    ASSERT_FALSE(has_subnormals() || rounds_to_nearest());
    {
        const cpu::DefaultFloatMode mode;
        EXPECT_TRUE(has_subnormals() && rounds_to_nearest());
        const cpu::DefaultFloatMode again;
        EXPECT_TRUE(has_subnormals() && rounds_to_nearest());
    }
    EXPECT_FALSE(has_subnormals() || rounds_to_nearest());
    EXPECT_EQ(std::fegetround(), FE_UPWARD);
    try {
        const cpu::DefaultFloatMode mode;
        throw std::runtime_error("an operator refuses its arguments");
    } catch (const std::runtime_error&) {
    }
    EXPECT_FALSE(has_subnormals() || rounds_to_nearest());
}

// Those that the default mode has raised stay, and the mode of a thread that has it is not touched.
TEST_F(FloatMode, exceptions_are_no_mode) {
    std::feclearexcept(FE_ALL_EXCEPT);
    {
        const cpu::DefaultFloatMode mode;
        volatile float zero = 0.0f;
        zero = 1.0f / zero;
    }
    EXPECT_TRUE(std::fetestexcept(FE_DIVBYZERO));
}

TEST_F(FloatMode, threads_of_the_pool_do_not_inherit_that_of_a_caller) {
    if (!flush_subnormals()) GTEST_SKIP() << "unknown processor";
    constexpr int kNumThreads = 4;
    set_num_threads(kNumThreads);
    std::atomic<int> num_inside{0}, num_without_subnormals{0};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    // Each thread has one item, since nobody leaves before all are inside.
    cpu::parallel_for(kNumThreads, [&](int64_t) {
        ++num_inside;
        while (num_inside < kNumThreads && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        if (!has_subnormals()) ++num_without_subnormals;
    });
    EXPECT_EQ(num_inside, kNumThreads);
    EXPECT_EQ(num_without_subnormals, 1);  // this one, whose mode operators set
}

}  // namespace
}  // namespace octavo
