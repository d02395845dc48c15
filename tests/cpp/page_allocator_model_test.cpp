// Random calls against a model that holds tokens, and that copies a page the moment it should be the
// sequence's own.
#include "allocator_testing.h"

#include <octavo/page_allocator.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <tuple>
#include <utility>

namespace octavo {
namespace {

using ModelPage = std::shared_ptr<std::vector<int>>;  // the tokens in it

struct ModelSequence {
    Sequence handle;
    std::vector<ModelPage> pages;
    int64_t length = 0;
    int64_t written = 0;  // tokens before this one are in the cache, not only counted
};

struct ModelCopy {
    ModelPage from;
    std::weak_ptr<std::vector<int>> to;
};

class Model {
  public:
    Model(int64_t num_pages, int64_t page_size) : num_pages_(num_pages), page_size_(page_size) {}

    std::vector<ModelSequence> sequences;

    // With pages of its own, shared as these are.
    Model clone() const {
        std::map<ModelPage, ModelPage> cloned;
        auto clone_of = [&](const ModelPage& page) {
            ModelPage& copy = cloned[page];
            if (!copy) copy = std::make_shared<std::vector<int>>(*page);
            return copy;
        };
        Model model = *this;
        for (ModelSequence& s : model.sequences) {
            for (ModelPage& page : s.pages) page = clone_of(page);
        }
        model.copies_.clear();
        for (const ModelCopy& copy : copies_) {
            if (ModelPage to = copy.to.lock()) model.copies_.push_back({clone_of(copy.from), clone_of(to)});
        }
        return model;
    }

    int64_t num_free() const {
        std::set<const void*> used;
        for (const ModelSequence& s : sequences) {
            for (const ModelPage& page : s.pages) used.insert(page.get());
        }
        for (const ModelCopy& copy : copies_) {
            if (!copy.to.expired()) used.insert(copy.from.get());
        }
        return num_pages_ - static_cast<int64_t>(used.size());
    }

    bool copies_tail(const ModelSequence& s, int64_t n) const {
        return n > 0 && s.length % page_size_ != 0 && num_holders(s.pages.back()) > 1;
    }

    int64_t num_new_pages(const ModelSequence& s, int64_t n) const {
        return (s.length + n + page_size_ - 1) / page_size_ - static_cast<int64_t>(s.pages.size());
    }

    void extend(ModelSequence& s, int64_t n) {
        if (copies_tail(s, n)) {
            ModelPage tail = s.pages.back();
            ModelPage from = tail;
            for (const ModelCopy& copy : copies_) {
                if (copy.to.lock() == tail) from = copy.from;
            }
            s.pages.back() = std::make_shared<std::vector<int>>(*tail);
            copies_.push_back({from, s.pages.back()});
        }
        for (int64_t i = 0; i < n; ++i, ++s.length) {
            if (s.length % page_size_ == 0) s.pages.push_back(std::make_shared<std::vector<int>>());
            s.pages.back()->resize(static_cast<size_t>(s.length % page_size_));
            s.pages.back()->push_back(next_token_++);
        }
    }

    void truncate(ModelSequence& s, int64_t length) {
        s.length = length;
        s.written = std::min(s.written, length);
        s.pages.resize(static_cast<size_t>((length + page_size_ - 1) / page_size_));
    }

    int token(const ModelSequence& s, int64_t i) const {
        return (*s.pages[static_cast<size_t>(i / page_size_)])[static_cast<size_t>(i % page_size_)];
    }

    int64_t take_copies() {
        int64_t count = 0;
        for (const ModelCopy& copy : copies_) count += !copy.to.expired();
        copies_.clear();
        return count;
    }

    void check_stats(const PageAllocatorStats& stats) const {
        std::map<const void*, std::pair<int, int64_t>> pages;  // holders, tokens
        int64_t num_tokens = 0;
        for (const ModelSequence& s : sequences) {
            num_tokens += s.length;
            for (size_t i = 0; i < s.pages.size(); ++i) {
                auto& [num_holders, filled] = pages[s.pages[i].get()];
                ++num_holders;
                filled =
                    std::max(filled, std::min(page_size_, s.length - static_cast<int64_t>(i) * page_size_));
            }
        }
        int64_t num_shared = 0, num_stored = 0;
        for (const auto& [page, counts] : pages) {
            num_shared += counts.first > 1;
            num_stored += counts.second;
        }
        ASSERT_EQ(stats.num_sequences, static_cast<int64_t>(sequences.size()));
        ASSERT_EQ(stats.num_free_pages, num_free());
        ASSERT_EQ(stats.num_used_pages, num_pages_ - num_free());
        ASSERT_EQ(stats.num_shared_pages, num_shared);
        ASSERT_EQ(stats.num_tokens, num_tokens);
        ASSERT_EQ(stats.num_stored_tokens, num_stored);
        double slots = static_cast<double>(stats.num_used_pages * page_size_);
        ASSERT_DOUBLE_EQ(stats.waste_percent,
                         slots > 0 ? 100 * (slots - static_cast<double>(num_stored)) / slots : 0);
    }

  private:
    int num_holders(const ModelPage& page) const {
        int count = 0;
        for (const ModelSequence& s : sequences) {
            count += static_cast<int>(std::count(s.pages.begin(), s.pages.end(), page));
        }
        return count;
    }

    int64_t num_pages_, page_size_;
    int next_token_ = 0;
    std::vector<ModelCopy> copies_;
};

struct Sizes {
    int64_t num_pages, page_size;
    uint32_t seed;
};

class Simulation {
  public:
    explicit Simulation(Sizes sizes)
        : page_size_(sizes.page_size),
          random_(sizes.seed),
          allocator_(sizes.num_pages, sizes.page_size),
          model_(sizes.num_pages, sizes.page_size),
          cache_(static_cast<size_t>(sizes.num_pages * sizes.page_size), -1),
          page_table_(static_cast<size_t>(kMaxBatch * sizes.num_pages)),
          copies_(static_cast<size_t>(2 * sizes.num_pages)),
          arrays_(kMaxBatch,
                  {{page_table_.data(), sizes.num_pages, sizes.num_pages, copies_.data(), sizes.num_pages}},
                  seq_lens_.data(), cu_seqlens_q_.data(),
                  {kMaxTokens, positions_.data(), last_rows_.data(), {slot_mapping_.data()}}) {}

    void call(bool is_checked) {
        size_t count = model_.sequences.size();
        int64_t action = below(100);
        if (count == 0 || (action < 8 && count < 10)) {
            model_.sequences.push_back({allocator_.create(), {}});
        } else if (action < 55) {
            extend(any(), below(4) ? below(page_size_ + 2) : below(4 * page_size_), below(2));
        } else if (action < 65) {
            if (below(3) == 0) {
                reorder();
            } else if (count < 10) {
                fork(below(static_cast<int64_t>(count)), below(4));
            }
        } else if (action < 77) {
            ModelSequence& s = any();
            int64_t length = below(s.length + 1);
            if (below(2)) length = std::max(length, s.length - below(page_size_ + 1));
            allocator_.truncate(s.handle, length);
            model_.truncate(s, length);
        } else if (action < 86) {
            int64_t i = below(static_cast<int64_t>(count));
            freed_.push_back(model_.sequences[i].handle);
            allocator_.free(freed_.back());
            model_.sequences.erase(model_.sequences.begin() + i);
        } else if (action < 90 && !freed_.empty()) {
            Sequence stale = freed_[below(static_cast<int64_t>(freed_.size()))];
            ASSERT_THROW(allocator_.extend(stale, 1), InvalidSequence);
            ASSERT_THROW(allocator_.free(stale), InvalidSequence);
        } else if (action < 95) {
            step_batch();
        } else {
            write_cache(allocator_.take_copies());
        }
        if (is_checked) check();
    }

  private:
    static constexpr int64_t kMaxBatch = 12, kMaxTokens = 3 * 16 * kMaxBatch;

    int64_t below(int64_t bound) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(bound)); }
    ModelSequence& any() { return model_.sequences[below(static_cast<int64_t>(model_.sequences.size()))]; }

    std::vector<Sequence> handles() const {
        std::vector<Sequence> handles;
        for (const ModelSequence& s : model_.sequences) handles.push_back(s.handle);
        return handles;
    }

    void extend(ModelSequence& s, int64_t n, bool try_it) {
        int64_t num_new = model_.num_new_pages(s, n);
        bool copies_tail = model_.copies_tail(s, n);
        bool fits = num_new + copies_tail <= model_.num_free();
        std::string before = fits ? "" : dump(allocator_, handles());
        if (try_it) {
            ASSERT_EQ(allocator_.try_extend(s.handle, n), fits);
        } else if (fits) {
            allocator_.extend(s.handle, n);
        } else {
            ASSERT_EQ(message_of<OutOfPages>([&] { allocator_.extend(s.handle, n); }),
                      "extend: needs " + std::to_string(num_new + copies_tail) + " pages (" +
                          std::to_string(num_new) + " new, " + std::to_string(copies_tail) +
                          " copy-on-write), " + std::to_string(model_.num_free()) + " free");
        }
        if (fits) {
            model_.extend(s, n);
        } else {
            ASSERT_EQ(dump(allocator_, handles()), before);
        }
    }

    void fork(int64_t parent, int64_t n) {
        const int64_t length = below(model_.sequences[parent].length + 1);
        const bool is_whole = below(2);
        for (Sequence handle : is_whole ? allocator_.fork(model_.sequences[parent].handle, n)
                                        : allocator_.fork(model_.sequences[parent].handle, n, length)) {
            ModelSequence child = model_.sequences[parent];
            child.handle = handle;
            if (!is_whole) model_.truncate(child, length);
            model_.sequences.push_back(child);
        }
    }

    void reorder() {
        const auto count = static_cast<int64_t>(model_.sequences.size());
        std::vector<int32_t> parents;
        for (int64_t i = 0; i < count; ++i) {
            parents.push_back(static_cast<int32_t>(below(3) ? i : below(count)));
        }
        const std::vector<Sequence> beam = handles();
        allocator_.reorder(beam.data(), parents.data(), count);
        const std::vector<ModelSequence> before = model_.sequences;
        for (int64_t i = 0; i < count; ++i) {
            model_.sequences[i] = before[parents[i]];
            model_.sequences[i].handle = beam[i];
        }
    }

    auto seen() const {
        return std::make_tuple(page_table_, seq_lens_, cu_seqlens_q_, copies_, positions_, last_rows_,
                               slot_mapping_);
    }

    // PageAllocator::step over some of the sequences, in some order.
    void step_batch() {
        std::vector<size_t> chosen(model_.sequences.size());
        for (size_t i = 0; i < chosen.size(); ++i) chosen[i] = i;
        std::shuffle(chosen.begin(), chosen.end(), random_);
        chosen.resize(static_cast<size_t>(below(static_cast<int64_t>(chosen.size()) + 1)));
        std::vector<Sequence> batch;
        std::vector<int32_t> n;
        for (size_t i : chosen) {
            batch.push_back(model_.sequences[i].handle);
            n.push_back(static_cast<int32_t>(below(2) ? 1 : below(3 * page_size_)));
        }
        const auto count = static_cast<int64_t>(batch.size());
        // One after the other, to see which fit.
        Model grown = model_.clone();
        std::vector<int64_t> unfit;
        for (size_t i = 0; i < chosen.size(); ++i) {
            ModelSequence& s = grown.sequences[chosen[i]];
            if (grown.num_new_pages(s, n[i]) + grown.copies_tail(s, n[i]) <= grown.num_free()) {
                grown.extend(s, n[i]);
            } else {
                unfit.push_back(static_cast<int64_t>(i));
            }
        }
        Model trial = model_.clone();  // with as many pages as it takes
        int64_t num_needed = 0;
        for (size_t i = 0; i < chosen.size(); ++i) {
            ModelSequence& s = trial.sequences[chosen[i]];
            num_needed += trial.num_new_pages(s, n[i]) + trial.copies_tail(s, n[i]);
            trial.extend(s, n[i]);
        }
        ASSERT_EQ(allocator_.needed(batch.data(), n.data(), count), num_needed);
        ASSERT_EQ(unfit.empty(), num_needed <= allocator_.num_free_pages());
        if (unfit.empty()) ASSERT_EQ(model_.num_free() - num_needed, grown.num_free());
        if (!unfit.empty()) {
            const std::string before = dump(allocator_, handles());
            const auto arrays = seen();
            try {
                allocator_.step(batch.data(), n.data(), count, arrays_);
                FAIL() << "nothing was thrown";
            } catch (const OutOfPages& error) {
                ASSERT_EQ(error.indices, unfit);
            }
            ASSERT_EQ(dump(allocator_, handles()), before);
            ASSERT_EQ(seen(), arrays);
            return;
        }
        model_ = std::move(grown);
        allocator_.step(batch.data(), n.data(), count, arrays_);
        std::vector<int32_t> table(page_table_.size(), -1), seq_lens(kMaxBatch, 0);
        allocator_.write_page_table(batch.data(), count, table.data(), allocator_.num_pages(),
                                    seq_lens.data());
        ASSERT_EQ(page_table_, table);
        ASSERT_TRUE(std::equal(seq_lens.begin(), seq_lens.end(), seq_lens_.begin()));
        for (int64_t i = 0; i < kMaxBatch; ++i) {
            ASSERT_EQ(cu_seqlens_q_[i + 1] - cu_seqlens_q_[i], i < count ? n[i] : 0);
        }
        check_tokens(batch, n);
        std::vector<PageCopy> copies;
        for (int64_t i = 0; i < arrays_.num_copies(); ++i) {
            copies.push_back({copies_[2 * i], copies_[2 * i + 1]});
        }
        write_cache(std::move(copies));
    }

    // Positions, slots and last rows of a step, token by token.
    void check_tokens(const std::vector<Sequence>& batch, const std::vector<int32_t>& n) {
        std::vector<int32_t> positions(kMaxTokens, 0);
        std::vector<int64_t> last_rows(kMaxBatch, 0), slots(kMaxTokens, -1);
        size_t row = 0;
        for (size_t i = 0; i < batch.size(); ++i) {
            const std::vector<int32_t> pages = allocator_.pages(batch[i]);
            const int64_t length = allocator_.length(batch[i]);
            for (int64_t position = length - n[i]; position < length; ++position, ++row) {
                positions[row] = static_cast<int32_t>(position);
                slots[row] = int64_t{pages[position / page_size_]} * page_size_ + position % page_size_;
                last_rows[i] = static_cast<int64_t>(row);
            }
        }
        ASSERT_EQ(positions_, positions);
        ASSERT_EQ(last_rows_, last_rows);
        ASSERT_EQ(slot_mapping_, slots);
    }

    // What a step of generation does: the copies, in any order, then the tokens that were not yet written.
    void write_cache(std::vector<PageCopy> copies) {
        check_copies(copies);
        ASSERT_EQ(static_cast<int64_t>(copies.size()), model_.take_copies());
        std::shuffle(copies.begin(), copies.end(), random_);
        for (PageCopy copy : copies) std::copy_n(slot(copy.from, 0), page_size_, slot(copy.to, 0));
        for (ModelSequence& s : model_.sequences) {
            std::vector<int32_t> pages = allocator_.pages(s.handle);
            for (; s.written < s.length; ++s.written) {
                *slot(pages[s.written / page_size_], s.written % page_size_) = model_.token(s, s.written);
            }
        }
        for (const ModelSequence& s : model_.sequences) {
            std::vector<int32_t> pages = allocator_.pages(s.handle);
            for (int64_t i = 0; i < s.length; ++i) {
                ASSERT_EQ(*slot(pages[i / page_size_], i % page_size_), model_.token(s, i));
            }
        }
    }

    void check() {
        allocator_.check_invariants();
        std::map<int32_t, const void*> model_of;
        std::map<const void*, int32_t> page_of;
        for (const ModelSequence& s : model_.sequences) {
            std::vector<int32_t> pages = allocator_.pages(s.handle);
            ASSERT_EQ(allocator_.length(s.handle), s.length);
            ASSERT_EQ(pages.size(), s.pages.size());
            for (size_t i = 0; i < pages.size(); ++i) {  // the same page exactly where the model shares one
                ASSERT_EQ(model_of.emplace(pages[i], s.pages[i].get()).first->second, s.pages[i].get());
                ASSERT_EQ(page_of.emplace(s.pages[i].get(), pages[i]).first->second, pages[i]);
            }
        }
        model_.check_stats(allocator_.stats());
    }

    int* slot(int32_t page, int64_t i) { return &cache_[static_cast<size_t>(page * page_size_ + i)]; }

    int64_t page_size_;
    std::mt19937_64 random_;
    PageAllocator allocator_;
    Model model_;
    std::vector<int> cache_;  // [num_pages, page_size], a token a slot
    std::vector<int32_t> page_table_, copies_;
    std::array<int32_t, kMaxBatch> seq_lens_;
    std::array<int32_t, kMaxBatch + 1> cu_seqlens_q_;
    std::vector<int32_t> positions_ = std::vector<int32_t>(kMaxTokens, 77);
    std::vector<int64_t> last_rows_ = std::vector<int64_t>(kMaxBatch, 77);
    std::vector<int64_t> slot_mapping_ = std::vector<int64_t>(kMaxTokens, 77);
    StepArrays arrays_;
    std::vector<Sequence> freed_;
};

class PageAllocatorModel : public testing::TestWithParam<Sizes> {};

TEST_P(PageAllocatorModel, AgreesOverRandomCalls) {
    Simulation simulation(GetParam());
    const int64_t num_calls = num_random_calls(40000);
    for (int64_t i = 0; i < num_calls; ++i) {
        simulation.call(is_checked(i));
        if (HasFatalFailure()) FAIL() << "at call " << i;
    }
}

INSTANTIATE_TEST_SUITE_P(Sizes, PageAllocatorModel,
                         testing::Values(Sizes{1, 1, 1}, Sizes{6, 1, 2}, Sizes{9, 3, 3}, Sizes{24, 4, 4},
                                         Sizes{17, 5, 5}, Sizes{40, 16, 6}),
                         [](const testing::TestParamInfo<Sizes>& sizes) {
                             return std::to_string(sizes.param.num_pages) + "x" +
                                    std::to_string(sizes.param.page_size);
                         });

// The same calls on two allocators, and before each of them, on the first one only, extends of every sequence
// and steps that cannot succeed. Everything seen from then on stays equal.
TEST(PageAllocatorTwins, OutOfPagesAtEveryPointLeavesNoTrace) {
    constexpr int64_t kPageSize = 3;
    for (int64_t num_pages = 1; num_pages <= 24; ++num_pages) {
        std::mt19937 random(static_cast<uint32_t>(num_pages));
        PageAllocator tried(num_pages, kPageSize), twin(num_pages, kPageSize);
        std::vector<Sequence> a, b;
        std::vector<int32_t> page_table(8 * 100), seq_lens(8);
        StepArrays arrays(8, {{page_table.data(), 100, 100}}, seq_lens.data());
        for (int i = 0; i < 200; ++i) {
            const std::string before = dump(tried, a);
            for (size_t unfit = 0; unfit < a.size(); ++unfit) {  // a step in which this one asks for too much
                std::vector<int32_t> n(a.size(), 1);
                n[unfit] = static_cast<int32_t>(tried.num_free_pages() + 1) * kPageSize;
                ASSERT_THROW(tried.step(a.data(), n.data(), static_cast<int64_t>(a.size()), arrays),
                             OutOfPages);
            }
            for (Sequence sequence : a) {
                ASSERT_THROW(tried.extend(sequence, (tried.num_free_pages() + 1) * kPageSize), OutOfPages);
                ASSERT_FALSE(tried.try_extend(sequence, (tried.num_free_pages() + 2) * kPageSize));
            }
            ASSERT_EQ(dump(tried, a), before);

            uint32_t action = random() % 10;
            size_t chosen = a.empty() ? 0 : random() % a.size();
            if (a.empty() || (action == 0 && a.size() < 8)) {
                a.push_back(tried.create());
                b.push_back(twin.create());
            } else if (action < 6) {
                int64_t n = random() % 6;
                ASSERT_EQ(tried.try_extend(a[chosen], n), twin.try_extend(b[chosen], n));
            } else if (action < 7 && a.size() < 8) {
                a.push_back(tried.fork(a[chosen])[0]);
                b.push_back(twin.fork(b[chosen])[0]);
            } else if (action < 8) {
                int64_t length = random() % (tried.length(a[chosen]) + 1);
                tried.truncate(a[chosen], length);
                twin.truncate(b[chosen], length);
            } else if (action < 9) {
                tried.free(a[chosen]);
                twin.free(b[chosen]);
                a.erase(a.begin() + static_cast<int64_t>(chosen));
                b.erase(b.begin() + static_cast<int64_t>(chosen));
            } else {
                std::vector<PageCopy> copies = tried.take_copies(), same = twin.take_copies();
                ASSERT_EQ(copies.size(), same.size());
                for (size_t j = 0; j < copies.size(); ++j) {
                    ASSERT_EQ(copies[j].from, same[j].from);
                    ASSERT_EQ(copies[j].to, same[j].to);
                }
            }
            ASSERT_EQ(dump(tried, a), dump(twin, b));
            tried.check_invariants();
        }
    }
}

}  // namespace
}  // namespace octavo
