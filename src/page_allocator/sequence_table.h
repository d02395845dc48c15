// The sequences and their handles. A handle is an index into the table and the generation of that entry,
// which every free advances, so that an old handle no longer matches.
#pragma once

#include <octavo/page_allocator.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace octavo {

struct SequenceEntry {
    // On the host, all pages that no other sequence held when it left.
    enum class Place : uint8_t { device, leaving, host, arriving };

    uint64_t handle;       // of the sequence; of a free entry, kFreeBit and the next sequence's
    int32_t length = 0;    // tokens
    int32_t next_free;     // of a free entry: the next one, or kNone
    uint64_t planned = 0;  // the last plan that this sequence was part of

    // For the prefix cache: the namespace, how many of the first tokens are known, how many of the first
    // pages are stored, and whether it waits for more of them to be.
    int32_t cache_namespace = 0;
    int32_t num_known = 0;
    int32_t num_stored = 0;
    bool is_waiting = false;
    bool is_pin = false;  // made by pin()

    Place place = Place::device;
};

class SequenceTable {
  public:
    // Handles are index | generation << kIndexBits, and below 2^63: they fit a signed integer too.
    static constexpr int kIndexBits = 28;
    static constexpr int kGenerationBits = 35;
    static constexpr uint64_t kFreeBit = uint64_t{1} << 63;
    static constexpr int32_t kMaxSequences = 1 << kIndexBits;

    SequenceTable();

    const std::vector<SequenceEntry>& entries() const { return entries_; }
    SequenceEntry& operator[](size_t index) { return entries_[index]; }
    int32_t size() const { return static_cast<int32_t>(entries_.size()) - num_free_; }
    static bool is_live(const SequenceEntry& entry) { return !(entry.handle & kFreeBit); }
    size_t index_of(const SequenceEntry& entry) const {
        return static_cast<size_t>(&entry - entries_.data());
    }

    // The entry of a live sequence, or null. Valid until reserve().
    SequenceEntry* find_live(Sequence sequence) {
        uint64_t handle = static_cast<uint64_t>(sequence);
        size_t index = handle & (kMaxSequences - 1);
        const bool is_live =
            index < entries_.size() && entries_[index].handle == handle && !(handle & kFreeBit);
        return is_live ? &entries_[index] : nullptr;
    }
    // Throws InvalidSequence in the name of `call` if there is none.
    SequenceEntry& find(const char* call, Sequence sequence) {
        SequenceEntry* entry = find_live(sequence);
        if (!entry) throw_invalid(call, static_cast<uint64_t>(sequence));
        return *entry;
    }
    const SequenceEntry& find(const char* call, Sequence sequence) const {
        return const_cast<SequenceTable*>(this)->find(call, sequence);
    }

    // Room for `count` more sequences, so that create cannot fail. size() + count may be at most
    // kMaxSequences. Returns the entries that create will give out, in order.
    std::vector<size_t> reserve(int64_t count);

    SequenceEntry& create() noexcept;  // an empty sequence; needs reserve()
    void free(SequenceEntry& entry) noexcept;

    void check() const;  // throws Error at the first contradiction

  private:
    static constexpr int32_t kNone = -1;

    [[noreturn]] void throw_invalid(const char* call, uint64_t handle) const;
    uint64_t age(uint64_t handle) const;  // how many sequences had the entry before

    std::vector<SequenceEntry> entries_;
    uint64_t first_generation_;
    int32_t num_free_ = 0;
    int32_t first_free_ = kNone;
};

}  // namespace octavo
