#include <octavo/page_allocator.h>

#include "common/fail.h"
#include "page_allocator/page_pool.h"
#include "page_allocator/sequence_table.h"

#include <algorithm>
#include <limits>

namespace octavo {

namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

int32_t checked_size(const char* name, int64_t value) {
    if (value < 1 || value > kMaxInt32) {
        fail<ValueError>("PageAllocator", name, " (", value, ") must be between 1 and ", kMaxInt32);
    }
    return static_cast<int32_t>(value);
}

void check_not_negative(const char* call, const char* name, int64_t value) {
    if (value < 0) fail<ValueError>(call, name, " (", value, ") must be at least 0");
}

// Last to first, so that they are handed out again first to last.
void release_from(PagePool& pool, const std::vector<int32_t>& pages, size_t first) {
    for (size_t i = pages.size(); i-- > first;) pool.release(pages[i]);
}

}  // namespace

struct PageAllocator::State {
    // What growing a sequence takes.
    struct Growth {
        int32_t new_length;
        int32_t num_new_pages;
        bool copies_tail;  // the last page is partly filled, and another sequence holds it too

        int64_t num_pages() const { return int64_t{num_new_pages} + copies_tail; }
    };

    State(int32_t num_pages, int32_t page_size) : pool(num_pages), page_size(page_size) {}

    int32_t pages_for(int32_t length) const { return length / page_size + (length % page_size != 0); }

    Growth plan_growth(const char* call, const SequenceEntry& entry, int64_t n) const;
    void grow(SequenceEntry& entry, const Growth& growth);  // the pages are there

    // As SequenceTable::reserve; throws ValueError in the name of `call` if these would be too many.
    void reserve_sequences(const char* call, int64_t count, size_t num_pages);

    PagePool pool;
    SequenceTable sequences;
    int32_t page_size;
};

PageAllocator::State::Growth PageAllocator::State::plan_growth(const char* call, const SequenceEntry& entry,
                                                               int64_t n) const {
    check_not_negative(call, "n", n);
    if (n > kMaxInt32 - entry.length) {
        fail<ValueError>(call, "n (", n, ") and the sequence's length (", entry.length,
                         ") must add up to at most ", kMaxInt32);
    }
    Growth growth;
    growth.new_length = entry.length + static_cast<int32_t>(n);
    growth.num_new_pages = pages_for(growth.new_length) - static_cast<int32_t>(entry.pages.size());
    growth.copies_tail = n > 0 && entry.length % page_size != 0 && pool.is_shared(entry.pages.back());
    return growth;
}

void PageAllocator::State::grow(SequenceEntry& entry, const Growth& growth) {
    size_t num_pages = entry.pages.size() + static_cast<size_t>(growth.num_new_pages);
    if (entry.pages.capacity() < num_pages) entry.pages.reserve(std::max(num_pages, 2 * entry.pages.size()));
    if (growth.copies_tail) {
        pool.reserve_copy();
        entry.pages.back() = pool.copy_on_write(entry.pages.back());
    }
    for (int32_t i = 0; i < growth.num_new_pages; ++i) entry.pages.push_back(pool.acquire());
    entry.length = growth.new_length;
}

void PageAllocator::State::reserve_sequences(const char* call, int64_t count, size_t num_pages) {
    if (count > SequenceTable::kMaxSequences - sequences.size()) {
        fail<ValueError>(call, "n (", count, ") and the number of sequences (", sequences.size(),
                         ") must add up to at most ", SequenceTable::kMaxSequences);
    }
    sequences.reserve(count, num_pages);
}

PageAllocator::PageAllocator(int64_t num_pages, int64_t page_size)
    : state_(std::make_unique<State>(checked_size("num_pages", num_pages),
                                     checked_size("page_size", page_size))) {}

PageAllocator::~PageAllocator() = default;
PageAllocator::PageAllocator(PageAllocator&&) noexcept = default;
PageAllocator& PageAllocator::operator=(PageAllocator&&) noexcept = default;

Sequence PageAllocator::create() {
    state_->reserve_sequences("create", 1, 0);
    return Sequence{state_->sequences.create().handle};
}

void PageAllocator::extend(Sequence sequence, int64_t n) {
    SequenceEntry& entry = state_->sequences.find("extend", sequence);
    State::Growth growth = state_->plan_growth("extend", entry, n);
    int64_t num_free = state_->pool.num_free();
    if (growth.num_pages() > num_free) {
        fail<OutOfPages>("extend", "needs ", growth.num_pages(), " pages (", growth.num_new_pages, " new, ",
                         int{growth.copies_tail}, " copy-on-write), ", num_free, " free");
    }
    state_->grow(entry, growth);
}

bool PageAllocator::try_extend(Sequence sequence, int64_t n) {
    SequenceEntry& entry = state_->sequences.find("try_extend", sequence);
    State::Growth growth = state_->plan_growth("try_extend", entry, n);
    if (growth.num_pages() > state_->pool.num_free()) return false;
    state_->grow(entry, growth);
    return true;
}

std::vector<Sequence> PageAllocator::fork(Sequence sequence, int64_t n) {
    SequenceTable& sequences = state_->sequences;
    size_t num_pages = sequences.find("fork", sequence).pages.size();
    check_not_negative("fork", "n", n);
    state_->reserve_sequences("fork", n, num_pages);
    std::vector<Sequence> children;
    children.reserve(static_cast<size_t>(n));

    const SequenceEntry& parent = sequences.find("fork", sequence);
    for (int64_t i = 0; i < n; ++i) {
        SequenceEntry& child = sequences.create();
        child.length = parent.length;
        child.pages.assign(parent.pages.begin(), parent.pages.end());
        children.push_back(Sequence{child.handle});
    }
    for (int32_t page : parent.pages) state_->pool.add_holders(page, static_cast<int32_t>(n));
    return children;
}

void PageAllocator::truncate(Sequence sequence, int64_t length) {
    SequenceEntry& entry = state_->sequences.find("truncate", sequence);
    if (length < 0 || length > entry.length) {
        fail<ValueError>("truncate", "length (", length, ") must be between 0 and the sequence's length (",
                         entry.length, ")");
    }
    entry.length = static_cast<int32_t>(length);
    size_t num_pages = state_->pages_for(entry.length);
    release_from(state_->pool, entry.pages, num_pages);
    entry.pages.resize(num_pages);
}

void PageAllocator::free(Sequence sequence) {
    SequenceEntry& entry = state_->sequences.find("free", sequence);
    release_from(state_->pool, entry.pages, 0);
    state_->sequences.free(entry);
}

int64_t PageAllocator::length(Sequence sequence) const {
    return state_->sequences.find("length", sequence).length;
}

std::vector<int32_t> PageAllocator::pages(Sequence sequence) const {
    return state_->sequences.find("pages", sequence).pages;
}

int64_t PageAllocator::max_pages(const Sequence* sequences, int64_t count) const {
    check_not_negative("page_table", "count", count);
    size_t num_pages = 0;
    for (int64_t i = 0; i < count; ++i) {
        num_pages = std::max(num_pages, state_->sequences.find("page_table", sequences[i]).pages.size());
    }
    return static_cast<int64_t>(num_pages);
}

void PageAllocator::write_page_table(const Sequence* sequences, int64_t count, int32_t* page_table,
                                     int64_t max_pages, int32_t* seq_lens) const {
    int64_t num_pages = this->max_pages(sequences, count);
    if (max_pages < num_pages) {
        fail<ValueError>("page_table", "max_pages (", max_pages, ") must be at least ", num_pages,
                         ", the pages of the longest sequence");
    }
    for (int64_t i = 0; i < count; ++i) {
        const SequenceEntry& entry = state_->sequences.find("page_table", sequences[i]);
        int32_t* row = page_table + i * max_pages;
        std::fill(std::copy(entry.pages.begin(), entry.pages.end(), row), row + max_pages, -1);
        seq_lens[i] = entry.length;
    }
}

std::vector<PageCopy> PageAllocator::take_copies() { return state_->pool.take_copies(); }

int64_t PageAllocator::num_pages() const { return state_->pool.num_pages(); }
int64_t PageAllocator::page_size() const { return state_->page_size; }
int64_t PageAllocator::num_free_pages() const { return state_->pool.num_free(); }

PageAllocatorStats PageAllocator::stats() const {
    const PagePool& pool = state_->pool;
    std::vector<int32_t> num_holders(static_cast<size_t>(pool.num_touched()));
    std::vector<int32_t> num_filled(num_holders.size());  // slots with a token, of each page
    PageAllocatorStats stats{};
    stats.num_pages = pool.num_pages();
    stats.page_size = state_->page_size;
    stats.num_sequences = state_->sequences.size();
    stats.num_free_pages = pool.num_free();
    stats.num_used_pages = stats.num_pages - stats.num_free_pages;
    for (const SequenceEntry& entry : state_->sequences.entries()) {
        stats.num_tokens += entry.length;
        int32_t left = entry.length;
        for (int32_t page : entry.pages) {
            int32_t filled = std::min(left, state_->page_size);
            left -= filled;
            if (++num_holders[page] == 2) ++stats.num_shared_pages;
            if (filled > num_filled[page]) {
                stats.num_stored_tokens += filled - num_filled[page];
                num_filled[page] = filled;
            }
        }
    }
    int64_t num_slots = stats.num_used_pages * stats.page_size;
    if (num_slots > 0) {
        stats.waste_percent =
            100.0 * static_cast<double>(num_slots - stats.num_stored_tokens) / static_cast<double>(num_slots);
    }
    return stats;
}

void PageAllocator::check_invariants() const {
    const PagePool& pool = state_->pool;
    state_->sequences.check();
    std::vector<int32_t> num_holders(static_cast<size_t>(pool.num_touched()));
    std::vector<int32_t> last_holder(num_holders.size(), -1);  // the last entry seen to hold a page
    std::vector<int32_t> position(num_holders.size());         // of each page in the sequences that hold it
    int32_t index = 0;
    for (const SequenceEntry& entry : state_->sequences.entries()) {
        auto fail_sequence = [&entry](const auto&... what) {
            fail<Error>("check_invariants", "sequence ", entry.handle, ' ', what...);
        };
        if (static_cast<int64_t>(entry.pages.size()) != state_->pages_for(entry.length)) {
            fail_sequence("has ", entry.pages.size(), " pages for ", entry.length, " tokens");
        }
        for (size_t i = 0; i < entry.pages.size(); ++i) {
            int32_t page = entry.pages[i];
            if (page < 0 || page >= pool.num_touched())
                fail_sequence("holds page ", page, ", never handed out");
            if (last_holder[page] == index) fail_sequence("holds page ", page, " twice");
            if (num_holders[page]++ > 0 && position[page] != static_cast<int32_t>(i)) {
                fail_sequence("holds page ", page, " at another place than its sharers");
            }
            last_holder[page] = index;
            position[page] = static_cast<int32_t>(i);
        }
        ++index;
    }
    pool.check(num_holders);
}

}  // namespace octavo
