// Times octavo::PageAllocator from C++: one JSON object a line. bench_page_allocator.py builds and runs it.
#include <octavo/page_allocator.h>

#include "page_allocator/siphash.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace octavo;

constexpr int kRounds = 30;
constexpr int64_t kPageSize = 16;

// Seconds of the fastest and of the median round. `prepare` is not timed.
struct Times {
    double best, median;
};

template <class Prepare, class Work>
Times time_rounds(const Prepare& prepare, const Work& work) {
    std::vector<double> seconds;
    for (int round = 0; round < kRounds; ++round) {
        prepare();
        const auto start = std::chrono::steady_clock::now();
        work();
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(seconds.begin(), seconds.end());
    return {seconds.front(), seconds[kRounds / 2]};
}

void report(const std::string& name, Times times, double count, const char* unit, double scale) {
    std::printf("{\"case\": \"%s\", \"best\": %.4g, \"median\": %.4g, \"unit\": \"%s\"}\n", name.c_str(),
                times.best * scale / count, times.median * scale / count, unit);
}

enum class Decode { plain, shuffled, cached };

// Decode: every sequence grows by one token a step, tables written. Shuffled: rows change places each time.
// Cached: the tokens are told, and full pages stored.
void time_step(int64_t batch, Decode kind) {
    constexpr int64_t kMaxPages = 256, kLength = 1000;
    const int64_t num_steps = kind == Decode::shuffled ? 1 : 64;
    std::optional<PrefixCacheOptions> prefix_cache;
    if (kind == Decode::cached) prefix_cache.emplace();
    PageAllocator allocator(batch * 80, kPageSize, prefix_cache);
    std::vector<Sequence> sequences;
    std::vector<int32_t> page_table(batch * kMaxPages), seq_lens(batch), cu_seqlens_q(batch + 1),
        copies(2 * batch);
    StepArrays arrays(batch, {{page_table.data(), kMaxPages, kMaxPages, copies.data(), batch}},
                      seq_lens.data(), cu_seqlens_q.data());
    std::mt19937 random(0);
    std::vector<int32_t> tokens(std::max<int64_t>(batch, kLength + kPageSize));
    for (int64_t i = 0; i < batch; ++i) {
        sequences.push_back(allocator.create());
        for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 128000);
        const auto n = static_cast<int32_t>(kLength + i % kPageSize);
        allocator.step(&sequences.back(), &n, 1, arrays, prefix_cache ? tokens.data() : nullptr);
    }
    const Times times = time_rounds(
        [&] {
            if (kind == Decode::shuffled) std::shuffle(sequences.begin(), sequences.end(), random);
            for (Sequence sequence : sequences) allocator.truncate(sequence, kLength);
            for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 128000);
        },
        [&] {
            for (int64_t step = 0; step < num_steps; ++step) {
                allocator.step(sequences.data(), nullptr, batch, arrays,
                               prefix_cache ? tokens.data() : nullptr);
            }
        });
    const char* kinds[] = {"", ", rows shuffled", ", tokens stored"};
    report("step, " + std::to_string(batch) + " sequences" + kinds[static_cast<int>(kind)], times,
           static_cast<double>(batch * num_steps), "ns a sequence", 1e9);
}

void time_pages() {
    constexpr int64_t kPages = 1'000'000;
    std::optional<PageAllocator> allocator;
    auto nothing = [&] { allocator.reset(); };
    report("construct a million pages", time_rounds(nothing, [&] { allocator.emplace(kPages, kPageSize); }),
           1, "ms", 1e3);
    Sequence sequence;
    auto fresh = [&] {
        allocator.emplace(kPages, kPageSize);
        sequence = allocator->create();
    };
    report("hand out a million pages, in one call",
           time_rounds(fresh, [&] { allocator->extend(sequence, kPages * kPageSize); }), kPages, "ns a page",
           1e9);
    auto all_held = [&] {
        if (allocator->length(sequence) == 0) allocator->extend(sequence, kPages * kPageSize);
    };
    report("take them back", time_rounds(all_held, [&] { allocator->truncate(sequence, 0); }), kPages,
           "ns a page", 1e9);
}

void time_prefix_cache(int64_t num_pages) {
    const int64_t count = num_pages * kPageSize;
    std::vector<int32_t> tokens(count);
    std::mt19937 random(0);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 128000);
    const std::string suffix = ", a prompt of " + std::to_string(num_pages) + " pages";

    auto nothing = [] {};
    Hash128 hash;
    report("hash" + suffix,
           time_rounds(nothing,
                       [&] {
                           hash = {};
                           for (int64_t i = 0; i < num_pages; ++i) {
                               hash = siphash13({1, 2}, hash, &tokens[i * kPageSize],
                                                kPageSize * sizeof(int32_t));
                           }
                       }),
           static_cast<double>(num_pages), "ns a page", 1e9);
    if (hash == Hash128{}) std::printf("\n");  // so that it is computed

    std::optional<PageAllocator> allocator;
    std::vector<int32_t> page_table(num_pages), seq_lens(1);
    StepArrays arrays(1, {{page_table.data(), num_pages, num_pages}}, seq_lens.data());
    Sequence sequence;
    const auto n = static_cast<int32_t>(count);
    report("store" + suffix,
           time_rounds(
               [&] {
                   allocator.emplace(65536, kPageSize, PrefixCacheOptions{});
                   sequence = allocator->create();
                   allocator->step(&sequence, &n, 1, arrays, tokens.data());
               },
               [&] { allocator->free(sequence); }),
           static_cast<double>(num_pages), "ns a page", 1e9);
    report("hit" + suffix,
           time_rounds(nothing, [&] { allocator->free(allocator->create(tokens.data(), count)); }),
           static_cast<double>(num_pages), "ns a page", 1e9);
}

// A cache larger than the CPU's, in which the pages of a prompt lie far apart.
void time_scattered_hits() {
    constexpr int64_t kPrompts = 4096, kPromptPages = 64, kCount = kPromptPages * kPageSize;
    PageAllocator allocator(kPrompts * kPromptPages, kPageSize, PrefixCacheOptions{});
    std::mt19937 random(0);
    std::vector<int32_t> tokens(kPrompts * kCount);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 128000);
    std::vector<int32_t> page_table(kPrompts * kPromptPages), seq_lens(kPrompts), n(kPrompts, kPageSize);
    StepArrays arrays(kPrompts, {{page_table.data(), kPromptPages, kPromptPages}}, seq_lens.data());
    std::vector<Sequence> sequences;
    for (int64_t i = 0; i < kPrompts; ++i) sequences.push_back(allocator.create());
    std::vector<int32_t> step_tokens(kPrompts * kPageSize);
    for (int64_t page = 0; page < kPromptPages; ++page) {
        for (int64_t i = 0; i < kPrompts; ++i) {
            std::copy_n(&tokens[i * kCount + page * kPageSize], kPageSize, &step_tokens[i * kPageSize]);
        }
        allocator.step(sequences.data(), n.data(), kPrompts, arrays, step_tokens.data());
    }
    for (Sequence sequence : sequences) allocator.free(sequence);
    std::vector<int64_t> chosen(256);
    const Times times = time_rounds(
        [&] {
            for (int64_t& prompt : chosen) prompt = static_cast<int64_t>(random() % kPrompts);
        },
        [&] {
            for (int64_t prompt : chosen) allocator.free(allocator.create(&tokens[prompt * kCount], kCount));
        });
    report("hit, pages scattered over a cache of 262144", times, 256 * kPromptPages, "ns a page", 1e9);
}

}  // namespace

int main() {
    time_step(1, Decode::plain);
    time_step(256, Decode::plain);
    time_step(256, Decode::shuffled);
    time_step(256, Decode::cached);
    time_step(4096, Decode::plain);
    time_pages();
    time_prefix_cache(64);
    time_prefix_cache(4096);
    time_scattered_hits();
}
