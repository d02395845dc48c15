// Random calls on an allocator with a prefix cache, against a cache of contents: what a slot holds stands for
// everything that the keys and values in it depend on, the namespace and all tokens so far. Whatever pages
// are shared, found, exchanged or evicted, each sequence has to read its own contents through its pages.
#include "allocator_testing.h"

#include <octavo/page_allocator.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <utility>

namespace octavo {
namespace {

using Ints = std::vector<int32_t>;

struct Setting {
    int64_t num_pages, page_size, hash_bits;
    uint32_t seed;
    std::vector<PageGroup> further = {};  // groups
};

class CachedSimulation {
  public:
    explicit CachedSimulation(const Setting& setting)
        : page_size_(setting.page_size),
          groups_(groups_of(setting)),
          random_(setting.seed),
          allocator_(groups_, options(setting)) {
        std::vector<PageTableArrays> tables;
        for (const PageGroup& group : groups_) {
            host_slots_.emplace_back(static_cast<size_t>(kNumHostPages * page_size_), -1);
            slots_.emplace_back(static_cast<size_t>(group.num_pages * page_size_), -1);
            page_tables_.emplace_back(static_cast<size_t>(kMaxBatch * kMaxPages));
            copies_.emplace_back(static_cast<size_t>(2 * kMaxPages));
            tables.push_back(
                {page_tables_.back().data(), kMaxPages, kMaxPages, copies_.back().data(), kMaxPages});
        }
        arrays_.emplace(kMaxBatch, tables, seq_lens_);
    }

    void call(bool is_checked) {
        const int64_t action = below(100);
        const size_t num_live = sequences_.size() + away_.size() + flights_.size();
        if (num_live < kMaxBatch && (sequences_.empty() || action < 15)) {
            create();
        } else if (sequences_.empty()) {
            below(2) ? confirm() : resume();
        } else if (action < 54) {
            step();
        } else if (action < 60) {
            const int64_t which = below(4);
            which == 0 ? preempt() : which == 1 ? resume() : confirm();
        } else if (action < 64) {
            extend_without_tokens();
        } else if (action < 72) {
            truncate();
        } else if (action < 78 && num_live + 2 < kMaxBatch) {
            fork();
        } else if (action < 82) {
            reorder();
        } else if (action < 92) {
            free();
        } else if (action < 96 && pins_.size() < 3) {
            const Ints tokens = prompt();
            pins_.push_back(allocator_.pin(tokens.data(), static_cast<int64_t>(tokens.size()), space()));
        } else if (!pins_.empty()) {
            allocator_.unpin(take_any(pins_));
        }
        if (is_checked) check();
    }

  private:
    static constexpr int64_t kMaxBatch = 8, kNumHostPages = 10, kMaxPages = 60;

    struct ModelSequence {
        Sequence handle;
        std::string space;
        Ints tokens;  // those that the allocator was not told are below 0, and differ everywhere
        int64_t num_written;
    };

    static std::vector<PageGroup> groups_of(const Setting& setting) {
        std::vector<PageGroup> groups = {{setting.num_pages, setting.page_size, -1, kNumHostPages}};
        groups.insert(groups.end(), setting.further.begin(), setting.further.end());
        return groups;
    }
    static PrefixCacheOptions options(const Setting& setting) {
        PrefixCacheOptions options;
        options.hash_key = {setting.seed, 0};
        options.hash_bits = setting.hash_bits;
        options.event_capacity = 16;
        return options;
    }

    int64_t below(int64_t bound) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(bound)); }
    ModelSequence& any() { return sequences_[below(static_cast<int64_t>(sequences_.size()))]; }
    std::string space() { return std::string(static_cast<size_t>(below(4) / 2), 'x'); }
    template <class T>
    T take_any(std::vector<T>& from) {
        std::swap(from[below(static_cast<int64_t>(from.size()))], from.back());
        T taken = from.back();
        from.pop_back();
        return taken;
    }
    Ints prompt() {  // few tokens and mostly the same: prompts begin alike
        Ints tokens(static_cast<size_t>(below(4 * page_size_ + 2)));
        for (int32_t& token : tokens) token = below(6) == 0;
        return tokens;
    }

    // What the slots hold after each of the tokens.
    Ints contents(const ModelSequence& s) {
        Ints contents;
        int32_t content = s.space.empty() ? -1 : -2;
        for (int32_t token : s.tokens) {
            const uint64_t mixed =
                (static_cast<uint64_t>(static_cast<uint32_t>(content)) << 32 | static_cast<uint32_t>(token)) *
                0x9E3779B97F4A7C15u;
            content = static_cast<int32_t>((mixed ^ mixed >> 29) >> 16);
            contents.push_back(content);
        }
        return contents;
    }
    // Null where the window has left the page behind.
    int32_t* slot(size_t g, const Ints& pages, int64_t i) {
        const int32_t page = pages[i / page_size_];
        return page < 0 ? nullptr : &slots_[g][static_cast<size_t>(page * page_size_ + i % page_size_)];
    }
    Ints pages_of(Sequence sequence, size_t g) { return allocator_.pages(sequence, static_cast<int64_t>(g)); }

    void create() {
        const Ints tokens = prompt();
        const auto count = static_cast<int64_t>(tokens.size());
        const std::string space = this->space();
        const int64_t most = std::max<int64_t>(count - 1, 0);  // the last one is left to be computed
        const int64_t expected = allocator_.num_cached_tokens(tokens.data(), most, space);
        if (groups_.size() == 1) {  // with windows more tokens may need what is not there
            ASSERT_LE(expected, allocator_.num_cached_tokens(tokens.data(), count, space));
        }
        const Sequence handle = allocator_.create(tokens.data(), count, space);
        const int64_t length = allocator_.length(handle);
        ASSERT_EQ(length, expected);
        for (const ModelSequence& s : sequences_) {  // what a live sequence has in full pages is found
            if (s.space != space || has_unmade_copies_ || !flights_.empty() || groups_.size() > 1) continue;
            const auto common = std::mismatch(tokens.begin(), tokens.end(), s.tokens.begin(),
                                              s.tokens.begin() + s.num_written);
            ASSERT_GE(length, std::min((common.first - tokens.begin()) / page_size_ * page_size_, most));
        }
        sequences_.push_back({handle, space, Ints(tokens.begin(), tokens.begin() + length), length});
    }

    void step() {
        std::vector<size_t> chosen;
        std::vector<Sequence> batch;
        Ints n, tokens;
        for (size_t i = 0; i < std::min<size_t>(sequences_.size(), kMaxBatch); ++i) {
            if (below(3) == 0) continue;
            chosen.push_back(i);
            batch.push_back(sequences_[i].handle);
            n.push_back(static_cast<int32_t>(below(4) == 0 ? below(2 * page_size_ + 2) : 1));
            for (int32_t j = 0; j < n.back(); ++j) tokens.push_back(below(6) == 0);
        }
        const auto count = static_cast<int64_t>(batch.size());
        const std::string before = dump(allocator_, handles());
        bool fits = true;
        for (int64_t g = 0; g < allocator_.num_groups(); ++g) {
            fits =
                fits && allocator_.needed(batch.data(), n.data(), count, g) <= allocator_.num_free_pages(g);
        }
        ASSERT_EQ(dump(allocator_, handles()), before);
        try {
            allocator_.step(batch.data(), n.data(), count, *arrays_, tokens.data());
            ASSERT_TRUE(fits);
        } catch (const OutOfPages& error) {
            ASSERT_FALSE(fits);
            ASSERT_EQ(dump(allocator_, handles()), before);
            ASSERT_FALSE(error.indices.empty());
            free();
            return;
        }
        size_t next = 0;
        for (size_t i = 0; i < chosen.size(); ++i) {
            Ints& appended = sequences_[chosen[i]].tokens;
            for (int32_t j = 0; j < n[i]; ++j) appended.push_back(tokens[next++]);
            for (size_t g = 0; g < groups_.size(); ++g) {
                const Ints pages = pages_of(batch[i], g);
                for (size_t j = 0; j < pages.size(); ++j) {
                    ASSERT_TRUE(pages[j] < 0 || page_tables_[g][i * kMaxPages + j] == pages[j]);
                }
            }
            ASSERT_EQ(seq_lens_[i], static_cast<int32_t>(appended.size()));
        }
        for (size_t g = 0; g < groups_.size(); ++g) {
            std::vector<PageCopy> copies;
            for (int64_t i = 0; i < arrays_->num_copies(static_cast<int64_t>(g)); ++i)
                copies.push_back({copies_[g][2 * i], copies_[g][2 * i + 1]});
            copy(g, std::move(copies));
        }
        write();
    }

    void extend_without_tokens() {
        ModelSequence& s = any();
        const int64_t n = below(page_size_ + 2);
        if (!allocator_.try_extend(s.handle, n)) return;
        for (int64_t i = 0; i < n; ++i) s.tokens.push_back(--last_unknown_);
        has_unmade_copies_ = true;
        if (below(2)) return;
        for (size_t g = 0; g < groups_.size(); ++g) copy(g, allocator_.take_copies(static_cast<int64_t>(g)));
        write();
    }

    void truncate() {
        ModelSequence& s = any();
        const auto length = static_cast<int64_t>(s.tokens.size());
        const int64_t kept = std::max<int64_t>(0, length - below(2 * page_size_));
        try {
            allocator_.truncate(s.handle, kept);
        } catch (const ValueError&) {
            ASSERT_GT(groups_.size(), 1u);  // behind a window
            return;
        }
        s.tokens.resize(static_cast<size_t>(kept));
        s.num_written = std::min(s.num_written, kept);
    }

    void fork() {
        if (has_unmade_copies_) return;  // a fork has what its pages hold
        ModelSequence s = any();
        const int64_t length = below(static_cast<int64_t>(s.tokens.size()) + 1);
        std::vector<Sequence> children;
        try {
            children = allocator_.fork(s.handle, 2, length);
        } catch (const ValueError&) {
            ASSERT_GT(groups_.size(), 1u);  // behind a window
            return;
        }
        s.tokens.resize(static_cast<size_t>(length));
        s.num_written = std::min(s.num_written, length);
        for (Sequence child : children) {
            s.handle = child;
            sequences_.push_back(s);
        }
    }

    void reorder() {
        if (has_unmade_copies_) return;
        std::shuffle(sequences_.begin(), sequences_.end(), random_);
        const int64_t count = below(static_cast<int64_t>(sequences_.size()) + 1);
        std::vector<Sequence> beam = handles();
        Ints parents;
        for (int64_t i = 0; i < count; ++i) parents.push_back(static_cast<int32_t>(below(count)));
        allocator_.reorder(beam.data(), parents.data(), count);
        const std::vector<ModelSequence> before = sequences_;
        for (int64_t i = 0; i < count; ++i) {
            sequences_[i] = before[parents[i]];
            sequences_[i].handle = beam[i];
        }
    }

    void free() {
        if (!sequences_.empty()) allocator_.free(take_any(sequences_).handle);
        if (below(8) == 0 && !away_.empty()) allocator_.free(take_any(away_).handle);
        if (below(4) == 0 && !flights_.empty()) {  // in the middle of a transfer
            std::vector<ModelSequence>& sequences = flights_.back().sequences;
            if (!sequences.empty()) allocator_.free(take_any(sequences).handle);
        }
    }

    static std::vector<Sequence> handles_of(const std::vector<ModelSequence>& sequences) {
        std::vector<Sequence> handles;
        for (const ModelSequence& s : sequences) handles.push_back(s.handle);
        return handles;
    }
    std::vector<ModelSequence> take_some(std::vector<ModelSequence>& from) {
        std::vector<ModelSequence> some;
        for (int64_t i = below(3); i >= 0 && !from.empty(); --i) some.push_back(take_any(from));
        return some;
    }

    void preempt() {
        if (has_unmade_copies_) return;
        Flight flight{{}, true, take_some(sequences_)};
        const std::vector<Sequence> handles = handles_of(flight.sequences);
        const std::string before = dump(allocator_, this->handles());
        try {
            flight.transfer = allocator_.preempt(handles.data(), static_cast<int64_t>(handles.size()));
        } catch (const OutOfPages&) {
            ASSERT_EQ(dump(allocator_, this->handles()), before);
            sequences_.insert(sequences_.end(), flight.sequences.begin(), flight.sequences.end());
            return;
        }
        for (Sequence handle : handles) ASSERT_THROW(allocator_.extend(handle, 1), ValueError);
        flights_.push_back(std::move(flight));
    }

    void resume() {
        if (has_unmade_copies_) return;
        Flight flight{{}, false, take_some(away_)};
        const std::vector<Sequence> handles = handles_of(flight.sequences);
        try {
            flight.transfer = allocator_.resume(handles.data(), static_cast<int64_t>(handles.size()));
        } catch (const OutOfPages&) {
            away_.insert(away_.end(), flight.sequences.begin(), flight.sequences.end());
            return;
        }
        for (Sequence handle : handles) ASSERT_THROW(allocator_.pages(handle), ValueError);
        flights_.push_back(std::move(flight));
    }

    // The copies are made as late as they may be: just before they are confirmed.
    void confirm() {
        if (flights_.empty()) return;
        const Flight flight = take_any(flights_);
        for (size_t g = 0; g < groups_.size(); ++g) {
            Ints& from = flight.leaves ? slots_[g] : host_slots_[g];
            Ints& to = flight.leaves ? host_slots_[g] : slots_[g];
            for (PageCopy copy : flight.transfer.copies[g])
                std::copy_n(&from[copy.from * page_size_], page_size_, &to[copy.to * page_size_]);
        }
        allocator_.confirm(flight.transfer.id);
        ASSERT_THROW(allocator_.confirm(flight.transfer.id), ValueError);
        std::vector<ModelSequence>& now = flight.leaves ? away_ : sequences_;
        now.insert(now.end(), flight.sequences.begin(), flight.sequences.end());
    }

    void copy(size_t g, std::vector<PageCopy> copies) {
        check_copies(copies);
        std::shuffle(copies.begin(), copies.end(), random_);
        for (PageCopy copy : copies) {
            std::copy_n(&slots_[g][copy.from * page_size_], page_size_, &slots_[g][copy.to * page_size_]);
        }
    }

    void write() {
        has_unmade_copies_ = false;
        for (ModelSequence& s : sequences_) {
            const Ints contents = this->contents(s);
            const auto length = static_cast<int64_t>(contents.size());
            for (size_t g = 0; g < groups_.size(); ++g) {
                const Ints pages = pages_of(s.handle, g);
                for (int64_t i = s.num_written; i < length; ++i) {
                    if (int32_t* slot = this->slot(g, pages, i)) *slot = contents[i];
                }
            }
            s.num_written = length;
        }
    }

    std::vector<Sequence> handles() const {
        std::vector<Sequence> handles;
        for (const ModelSequence& s : sequences_) handles.push_back(s.handle);
        return handles;
    }

    void check() {
        allocator_.check_invariants();
        allocator_.take_events();
        for (const ModelSequence& s : sequences_) {
            ASSERT_EQ(allocator_.length(s.handle), static_cast<int64_t>(s.tokens.size()));
            if (has_unmade_copies_) continue;
            const Ints contents = this->contents(s);
            for (size_t g = 0; g < groups_.size(); ++g) {
                const Ints pages = pages_of(s.handle, g);
                const int64_t window = groups_[g].window_left;
                const int64_t first_seen = window < 0 ? 0 : s.num_written - window;
                for (int64_t i = 0; i < s.num_written; ++i) {
                    if (const int32_t* slot = this->slot(g, pages, i)) {
                        ASSERT_EQ(*slot, contents[i]);
                    } else {
                        ASSERT_LT(i, first_seen);
                    }
                }
            }
        }
    }

    int64_t page_size_;
    std::vector<PageGroup> groups_;
    std::mt19937_64 random_;
    PageAllocator allocator_;
    std::vector<Ints> host_slots_;  // of each group, [num_host_pages, page_size]
    std::vector<Ints> slots_;       // of each group, [num_pages, page_size]
    std::vector<Ints> page_tables_, copies_;
    int32_t seq_lens_[kMaxBatch];
    std::optional<StepArrays> arrays_;
    std::vector<ModelSequence> sequences_;
    std::vector<ModelSequence> away_;  // preempted
    struct Flight {
        Transfer transfer;
        bool leaves;
        std::vector<ModelSequence> sequences;
    };
    std::vector<Flight> flights_;
    std::vector<Sequence> pins_;
    int32_t last_unknown_ = 0;
    bool has_unmade_copies_ = false;
};

class PrefixCacheModel : public testing::TestWithParam<Setting> {};

TEST_P(PrefixCacheModel, EverySequenceReadsItsOwn) {
    CachedSimulation simulation(GetParam());
    const int64_t num_calls = num_random_calls(20000);
    for (int64_t i = 0; i < num_calls; ++i) {
        simulation.call(is_checked(i));
        if (HasFatalFailure()) FAIL() << "at call " << i;
    }
}

INSTANTIATE_TEST_SUITE_P(
    Settings, PrefixCacheModel,
    testing::Values(Setting{4, 1, 128, 1}, Setting{12, 2, 128, 2}, Setting{24, 3, 0, 3}, Setting{40, 4, 2, 4},
                    Setting{60, 5, 128, 5}, Setting{30, 3, 128, 6, {{30, 3, -1, 10}}},
                    Setting{40, 2, 128, 7, {{20, 2, 5, 10}}},
                    Setting{50, 4, 1, 8, {{24, 4, 3, 6}, {60, 4, -1, 10}, {30, 4, 0, 10}}}),
    [](const testing::TestParamInfo<Setting>& setting) {
        return std::to_string(setting.param.num_pages) + "x" + std::to_string(setting.param.page_size) + "_" +
               std::to_string(setting.param.hash_bits) + "_bits_" +
               std::to_string(1 + setting.param.further.size()) + "_groups";
    });

}  // namespace
}  // namespace octavo
