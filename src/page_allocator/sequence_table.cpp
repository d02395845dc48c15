#include "page_allocator/sequence_table.h"

#include "common/fail.h"

#include <atomic>
#include <cassert>

namespace octavo {

namespace {

constexpr uint64_t kGeneration = uint64_t{1} << SequenceTable::kIndexBits;

// Far from the generations of every other allocator, so that their handles do not pass for this one's:
// multiples of the golden ratio spread evenly over any range (Fibonacci hashing, Knuth, TAOCP 6.4).
uint64_t new_first_generation() {
    static std::atomic<uint64_t> num_tables{0};
    uint64_t table = num_tables.fetch_add(1, std::memory_order_relaxed) + 1;
    return (table * 0x9E3779B97F4A7C15u) >> (64 - SequenceTable::kGenerationBits);
}

}  // namespace

SequenceTable::SequenceTable() : first_generation_(new_first_generation()) {}

std::vector<size_t> SequenceTable::reserve(int64_t count) {
    std::vector<size_t> next;
    next.reserve(static_cast<size_t>(count));
    if (count > num_free_) {
        size_t old_size = entries_.size();
        entries_.resize(old_size + static_cast<size_t>(count - num_free_));
        for (size_t index = entries_.size(); index-- > old_size;) {  // so that the lowest is used first
            entries_[index].handle = kFreeBit | first_generation_ << kIndexBits | index;
            entries_[index].next_free = first_free_;
            first_free_ = static_cast<int32_t>(index);
            ++num_free_;
        }
    }
    for (int32_t index = first_free_; static_cast<int64_t>(next.size()) < count;
         index = entries_[index].next_free) {
        next.push_back(static_cast<size_t>(index));
    }
    return next;
}

SequenceEntry& SequenceTable::create() noexcept {
    assert(num_free_ > 0);
    SequenceEntry& entry = entries_[first_free_];
    first_free_ = entry.next_free;
    --num_free_;
    entry.handle &= ~kFreeBit;
    return entry;
}

void SequenceTable::free(SequenceEntry& entry) noexcept {
    entry.handle = (entry.handle + kGeneration) | kFreeBit;
    entry.place = SequenceEntry::Place::device;
    entry.length = entry.cache_namespace = entry.num_known = entry.num_stored = 0;
    entry.is_pin = false;
    entry.next_free = first_free_;
    first_free_ = static_cast<int32_t>(index_of(entry));
    ++num_free_;
}

void SequenceTable::check() const {
    auto fail_entry = [](size_t index, const auto&... what) {
        fail<Error>("check_invariants", "entry ", index, ' ', what...);
    };
    std::vector<bool> is_free(entries_.size());
    int32_t num_listed = 0;
    for (int32_t index = first_free_; index != kNone; index = entries_[index].next_free, ++num_listed) {
        if (index < 0 || static_cast<size_t>(index) >= entries_.size()) fail_entry(index, "does not exist");
        if (is_free[index]) fail_entry(index, "is listed as free twice");
        if (entries_[index].length != 0) fail_entry(index, "is free, but has a length");
        is_free[index] = true;
    }
    if (num_listed != num_free_) {
        fail<Error>("check_invariants", num_listed, " entries are listed as free, but ", num_free_,
                    " counted");
    }
    for (size_t index = 0; index < entries_.size(); ++index) {
        uint64_t handle = entries_[index].handle;
        if ((handle & (kMaxSequences - 1)) != index) fail_entry(index, "has the handle of another, ", handle);
        if (is_free[index] != ((handle & kFreeBit) != 0))
            fail_entry(index, "is live and listed as free, or neither");
    }
}

uint64_t SequenceTable::age(uint64_t handle) const {
    uint64_t generation = (handle & ~kFreeBit) >> kIndexBits;
    return (generation - first_generation_) & ((uint64_t{1} << kGenerationBits) - 1);
}

void SequenceTable::throw_invalid(const char* call, uint64_t handle) const {
    size_t index = handle & (kMaxSequences - 1);
    bool was_freed =
        !(handle & kFreeBit) && index < entries_.size() && age(handle) < age(entries_[index].handle);
    fail<InvalidSequence>(call, "sequence ", static_cast<int64_t>(handle),
                          was_freed ? " was freed" : " is not one of this allocator's");
}

}  // namespace octavo
