// Several threads at once on one allocator. Built with ThreadSanitizer, every race is an error.
#include "allocator_testing.h"

#include <octavo/page_allocator.h>

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

namespace octavo {
namespace {

using Ints = std::vector<int32_t>;

constexpr int kNumThreads = 4;
constexpr int64_t kNumPages = 256, kPageSize = 4, kMaxBatch = 4;

// One engine of several: its own sequences, prompts that others have too.
class Engine {
  public:
    Engine(PageAllocator& allocator, StepArrays& shared_arrays, uint32_t seed)
        : allocator_(allocator), shared_arrays_(shared_arrays), random_(seed) {}

    void run(int64_t num_rounds) {
        for (int64_t round = 0; round < num_rounds; ++round) {
            try {
                serve();
            } catch (const OutOfPages&) {
                ++num_refused_;
            }
            while (!sequences_.empty()) {
                allocator_.free(sequences_.back());
                sequences_.pop_back();
            }
        }
    }

  private:
    int64_t below(int64_t bound) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(bound)); }

    void serve() {
        Ints prompt(static_cast<size_t>(1 + below(30)));
        for (int32_t& token : prompt) token = below(8) == 0;
        const auto count = static_cast<int64_t>(prompt.size());
        const Sequence sequence = allocator_.create(prompt.data(), count, below(2) ? "a" : "b");
        sequences_.push_back(sequence);
        const int64_t num_found = allocator_.length(sequence);
        const auto num_new = static_cast<int32_t>(count - num_found);
        allocator_.step(&sequence, &num_new, 1, arrays_, prompt.data() + num_found);
        ASSERT_EQ(seq_lens_[0], count);
        for (Sequence child : allocator_.fork(sequence, 2, below(count))) sequences_.push_back(child);
        const Ints tokens(sequences_.size(), 1);
        allocator_.step(sequences_.data(), nullptr, 3, arrays_, tokens.data());
        for (int i = 0; i < 3; ++i) ASSERT_EQ(seq_lens_[i], allocator_.length(sequences_[i]));
        const Ints parents = {2, 0, 1};
        allocator_.reorder(sequences_.data(), parents.data(), 3);
        allocator_.step(sequences_.data(), nullptr, 3,
                        shared_arrays_);  // whoever comes last has its rows there
        allocator_.truncate(sequences_[1], 0);
        allocator_.num_cached_tokens(prompt.data(), count, "a");
        const Sequence pin = allocator_.pin(prompt.data(), count, "b");
        allocator_.stats();
        allocator_.cache_stats();
        allocator_.num_free_pages();
        allocator_.take_copies();
        if (below(16) == 0) allocator_.check_invariants();
        allocator_.unpin(pin);
        allocator_.take_events();
    }

    PageAllocator& allocator_;
    StepArrays& shared_arrays_;
    std::mt19937 random_;
    std::vector<Sequence> sequences_;
    int64_t num_refused_ = 0;
    Ints page_table_ = Ints(kMaxBatch * kNumPages), seq_lens_ = Ints(kMaxBatch),
         copies_ = Ints(2 * kNumPages);
    StepArrays arrays_{
        kMaxBatch, {{page_table_.data(), kNumPages, kNumPages, copies_.data(), kNumPages}}, seq_lens_.data()};
};

TEST(PageAllocatorThreads, ShareAnAllocator) {
    PrefixCacheOptions options;
    options.event_capacity = 32;
    PageAllocator allocator(kNumPages, kPageSize, options);
    Ints page_table(kMaxBatch * kNumPages), seq_lens(kMaxBatch);
    StepArrays arrays(kMaxBatch, {{page_table.data(), kNumPages, kNumPages}}, seq_lens.data());
    std::vector<std::thread> threads;
    const int64_t num_rounds = num_random_calls(20000) / 10 / kNumThreads;
    for (int i = 0; i < kNumThreads; ++i) {
        threads.emplace_back([&, i] { Engine(allocator, arrays, static_cast<uint32_t>(i)).run(num_rounds); });
    }
    for (std::thread& thread : threads) thread.join();
    allocator.take_copies();
    EXPECT_EQ(allocator.num_free_pages(), kNumPages);
    EXPECT_EQ(allocator.stats().num_sequences, 0);
    allocator.check_invariants();
}

TEST(PageAllocatorThreads, LookAtASequenceThatGrows) {
    PageAllocator allocator(kNumPages, 1);
    const Sequence sequence = allocator.create();
    std::atomic<bool> is_done{false};
    std::thread other([&] {
        while (!is_done) {
            while (allocator.try_extend(sequence, 1)) {
            }
            allocator.truncate(sequence, 0);
        }
    });
    for (int i = 0; i < 2000; ++i) {
        const PageTable table = allocator.page_table(&sequence, 1);
        EXPECT_EQ(table.max_pages, table.seq_lens[0]);
        EXPECT_EQ(static_cast<int64_t>(table.page_table.size()), table.max_pages);
    }
    is_done = true;
    other.join();
}

TEST(PageAllocatorThreads, MakeAllocators) {
    std::atomic<int> num_foreign{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kNumThreads; ++i) {
        threads.emplace_back([&] {
            PageAllocator first(8, 4), second(8, 4);
            try {
                first.free(second.create());
            } catch (const InvalidSequence&) {
                ++num_foreign;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(num_foreign, kNumThreads);
}

}  // namespace
}  // namespace octavo
