#include <octavo/page_allocator.h>

#include "page_allocator/allocator_state.h"

#include <algorithm>
#include <atomic>
#include <map>

namespace octavo {

namespace {

void check_group(const PageGroup& group) {
    auto check_between = [](const char* name, int64_t value, int64_t least) {
        if (value < least || value > kMaxInt32) {
            fail<ValueError>("PageAllocator", name, " (", value, ") must be between ", least, " and ",
                             kMaxInt32);
        }
    };
    check_between("num_pages", group.num_pages, 1);
    check_between("page_size", group.page_size, 1);
    if (group.window_left < -1) {
        fail<ValueError>("PageAllocator", "window_left (", group.window_left,
                         ") must be -1 (unbounded) or at least 0");
    }
    check_between("num_host_pages", group.num_host_pages, 0);
}

// The groups are right by themselves.
void check_prefix_cache(const PrefixCacheOptions& options, const std::vector<PageGroup>& groups) {
    if (groups[0].window_left >= 0) {
        fail<ValueError>("PageAllocator", "prefix_cache must be off with a window",
                         groups.size() > 1 ? " in group 0" : "", "; window_left is ", groups[0].window_left);
    }
    for (size_t g = 0; g < groups.size(); ++g) {
        if (groups[g].page_size != groups[0].page_size) {
            fail<ValueError>("PageAllocator",
                             "prefix_cache must be off with groups of several page sizes; that of group ", g,
                             " is ", groups[g].page_size, ", that of group 0 ", groups[0].page_size);
        }
        if (groups[g].num_pages + groups[g].num_host_pages >= PrefixCache::kMaxPages) {
            fail<ValueError>("PageAllocator", "num_pages (", groups[g].num_pages, ") and num_host_pages (",
                             groups[g].num_host_pages, ") must add up to less than ", PrefixCache::kMaxPages,
                             " with a prefix cache");
        }
    }
    if (options.hash_bits < 0 || options.hash_bits > 128) {
        fail<ValueError>("PageAllocator", "hash_bits (", options.hash_bits, ") must be between 0 and 128");
    }
    if (options.event_capacity < 0 || options.event_capacity > kMaxInt32) {
        fail<ValueError>("PageAllocator", "event_capacity (", options.event_capacity,
                         ") must be between 0 and ", kMaxInt32);
    }
}

uint64_t new_allocator_id() {
    static std::atomic<uint64_t> num_allocators{0};
    return num_allocators.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

PageAllocator::State::State(const std::vector<PageGroup>& given,
                            const std::optional<PrefixCacheOptions>& prefix_cache)
    : id(new_allocator_id()) {
    if (given.empty()) fail<ValueError>("PageAllocator", "groups must not be empty");
    for (const PageGroup& group : given) check_group(group);
    if (prefix_cache) check_prefix_cache(*prefix_cache, given);
    groups.reserve(given.size());
    for (const PageGroup& group : given) {
        const auto num_pages = static_cast<int32_t>(group.num_pages);
        const auto page_size = static_cast<int32_t>(group.page_size);
        const int32_t window_left =
            group.window_left > kMaxInt32 ? -1 : static_cast<int32_t>(group.window_left);
        StoredPages* stored = nullptr;
        if (cache) {
            stored = &cache->add_companions(num_pages);
        } else if (prefix_cache) {
            cache = std::make_unique<PrefixCache>(num_pages, group.num_host_pages, page_size, *prefix_cache);
            stored = cache.get();
        }
        groups.emplace_back(num_pages, page_size, window_left, static_cast<int32_t>(group.num_host_pages),
                            stored);
    }
    plans.resize(groups.size());
}

PageLists& PageAllocator::State::group_at(const char* call, int64_t group) {
    if (group < 0 || group >= static_cast<int64_t>(groups.size())) {
        fail<ValueError>(call, "group (", group, ") must be one of the ", groups.size(), " groups");
    }
    return groups[group];
}

std::string PageAllocator::State::in_group(size_t group) const {
    return groups.size() == 1 ? "" : " in group " + std::to_string(group);
}

std::vector<size_t> PageAllocator::State::reserve_sequences(const char* call, int64_t count) {
    if (count > SequenceTable::kMaxSequences - sequences.size()) {
        fail<ValueError>(call, "n (", count, ") and the number of sequences (", sequences.size(),
                         ") must add up to at most ", SequenceTable::kMaxSequences);
    }
    std::vector<size_t> entries = sequences.reserve(count);
    for (PageLists& lists : groups) lists.resize(sequences.entries().size());
    if (cache && waiting.capacity() < sequences.entries().size()) {  // each waits once
        waiting.reserve(2 * sequences.entries().size());
    }
    return entries;
}

PageAllocator::PageAllocator(int64_t num_pages, int64_t page_size,
                             const std::optional<PrefixCacheOptions>& prefix_cache)
    : PageAllocator(std::vector<PageGroup>{{num_pages, page_size}}, prefix_cache) {}

PageAllocator::PageAllocator(const std::vector<PageGroup>& groups,
                             const std::optional<PrefixCacheOptions>& prefix_cache) try
    : state_(std::make_unique<State>(groups, prefix_cache)) {
} catch (const std::bad_alloc&) {
    int64_t num_pages = 0, num_host_pages = 0;
    for (const PageGroup& group : groups) {
        num_pages += group.num_pages;
        num_host_pages += group.num_host_pages;
    }
    fail<OutOfMemory>("PageAllocator", "there is too little memory for num_pages (", num_pages,
                      "), num_host_pages (", num_host_pages, ") and event_capacity (",
                      prefix_cache ? prefix_cache->event_capacity : 0, ")");
}

PageAllocator::~PageAllocator() = default;
PageAllocator::PageAllocator(PageAllocator&&) noexcept = default;
PageAllocator& PageAllocator::operator=(PageAllocator&&) noexcept = default;

Sequence PageAllocator::create() {
    std::lock_guard lock(state_->mutex);
    state_->reserve_sequences("create", 1);
    if (state_->cache) state_->cache->use_again(0);
    return Sequence{state_->sequences.create().handle};
}

std::vector<Sequence> PageAllocator::fork(Sequence sequence, int64_t n, std::optional<int64_t> length) {
    std::lock_guard lock(state_->mutex);
    SequenceTable& sequences = state_->sequences;
    const size_t parent = sequences.index_of(state_->find_on_device("fork", sequence));
    check_not_negative("fork", "n", n);
    const int32_t full_length = sequences[parent].length;
    if (length && (*length < 0 || *length > full_length)) {
        fail<ValueError>("fork", "length (", *length, ") must be between 0 and the sequence's length (",
                         full_length, ")");
    }
    const int32_t kept = length ? static_cast<int32_t>(*length) : full_length;
    state_->check_kept("fork", parent, kept);
    if (state_->cache) state_->store_pages(parent);
    std::vector<size_t> entries;
    std::vector<Sequence> children;
    try {
        entries = state_->reserve_sequences("fork", n);
        for (PageLists& lists : state_->groups) {
            for (size_t index : entries) lists.reserve(index, static_cast<size_t>(lists.pages_for(kept)));
        }
        children.reserve(entries.size());
    } catch (const std::bad_alloc&) {
        fail<OutOfMemory>("fork", "there is too little memory for n (", n, ") more sequences");
    }
    for (size_t index : entries) {
        SequenceEntry& child = sequences.create();
        child.length = full_length;
        if (state_->cache) {
            state_->cache->use_again(sequences[parent].cache_namespace);
            state_->set_known(child, sequences[parent]);
        }
        state_->shorten(child, kept);
        if (state_->cache) state_->wait_to_store(index);
        for (PageLists& lists : state_->groups) {
            lists.hold(index, lists[parent].pages.data(), static_cast<size_t>(lists.pages_for(kept)));
        }
        children.push_back(Sequence{child.handle});
    }
    return children;
}

void PageAllocator::reorder(const Sequence* sequences, const int32_t* parents, int64_t count) {
    std::lock_guard lock(state_->mutex);
    std::vector<PageLists>& groups = state_->groups;
    // What the sequences that go on from another will hold; afterwards, what they held.
    struct Change {
        size_t index;
        SequenceEntry parent;
        std::vector<PageList> lists;  // one a group
    };
    const std::vector<size_t> entries =
        state_->find_all_at("reorder", sequences, count, SequenceEntry::Place::device);
    for (int64_t i = 0; i < count; ++i) {
        if (parents[i] < 0 || parents[i] >= count) {
            fail<ValueError>("reorder", "parents[", i, "] (", parents[i], ") must be between 0 and ",
                             count - 1);
        }
        const SequenceEntry& entry = state_->sequences[entries[i]];
        if (entry.is_pin && parents[i] != i) {
            fail<ValueError>("reorder", "sequence ", entry.handle,
                             " is a pin, which cannot go on from another; fork it");
        }
    }
    if (state_->cache) {
        for (size_t index : entries) state_->store_pages(index);
    }
    std::vector<Change> changes;
    for (int64_t i = 0; i < count; ++i) {
        if (parents[i] == i) continue;
        const size_t parent = entries[parents[i]];
        changes.push_back({entries[i], state_->sequences[parent], {}});
        for (const PageLists& lists : groups) changes.back().lists.push_back(lists[parent]);
    }

    // Nothing is let go before all is held anew.
    if (state_->cache) {
        for (const Change& change : changes) state_->cache->use_again(change.parent.cache_namespace);
    }
    for (Change& change : changes) {
        SequenceEntry& entry = state_->sequences[change.index];
        entry.length = change.parent.length;
        if (state_->cache) {
            state_->cache->unuse_namespace(entry.cache_namespace);
            state_->set_known(entry, change.parent);
            state_->wait_to_store(change.index);
        }
        for (size_t g = 0; g < groups.size(); ++g) groups[g].exchange(change.index, change.lists[g]);
    }
    for (const Change& change : changes) {
        for (size_t g = 0; g < groups.size(); ++g) groups[g].release(change.lists[g]);
    }
}

void PageAllocator::State::check_kept(const char* call, size_t index, int64_t length) const {
    if (length == sequences.entries()[index].length || length == 0) return;
    for (size_t g = 0; g < groups.size(); ++g) {
        if (length < groups[g].min_length(index)) {
            fail<ValueError>(call, "length (", length, ") must be 0 or at least ",
                             groups[g].min_length(index), ": the pages before its window were returned",
                             in_group(g));
        }
    }
}

void PageAllocator::State::shorten(SequenceEntry& entry, int32_t length) noexcept {
    entry.length = length;
    entry.num_known = std::min(entry.num_known, length);
    entry.num_stored = std::min(entry.num_stored, entry.num_known / groups[0].page_size());
}

void PageAllocator::truncate(Sequence sequence, int64_t length) {
    std::lock_guard lock(state_->mutex);
    SequenceEntry& entry = state_->find_on_device("truncate", sequence);
    if (length < 0 || length > entry.length) {
        fail<ValueError>("truncate", "length (", length, ") must be between 0 and the sequence's length (",
                         entry.length, ")");
    }
    state_->check_kept("truncate", state_->sequences.index_of(entry), length);
    state_->shorten(entry, static_cast<int32_t>(length));
    for (PageLists& lists : state_->groups) lists.truncate(state_->sequences.index_of(entry), entry.length);
}

void PageAllocator::State::free(const char* call, Sequence sequence) {
    SequenceEntry& entry = sequences.find(call, sequence);
    const size_t index = sequences.index_of(entry);
    if (cache) store_pages(index);
    for (PageLists& lists : groups) lists.truncate(index, 0);
    if (cache) cache->unuse_namespace(entry.cache_namespace);
    sequences.free(entry);
}

void PageAllocator::free(Sequence sequence) {
    std::lock_guard lock(state_->mutex);
    state_->free("free", sequence);
}

int64_t PageAllocator::length(Sequence sequence) const {
    std::lock_guard lock(state_->mutex);
    return state_->sequences.find("length", sequence).length;
}

std::vector<int32_t> PageAllocator::pages(Sequence sequence, int64_t group) const {
    std::lock_guard lock(state_->mutex);
    const PageLists& lists = state_->group_at("pages", group);
    std::vector<int32_t> pages =
        lists[state_->sequences.index_of(state_->find_on_device("pages", sequence))].pages;
    std::replace(pages.begin(), pages.end(), PageList::kReturned, -1);
    return pages;
}

int64_t PageAllocator::State::max_pages(const char* call, const Sequence* handles, int64_t count,
                                        int64_t group) {
    const PageLists& lists = group_at(call, group);
    check_not_negative(call, "count", count);
    size_t num_pages = 0;
    for (int64_t i = 0; i < count; ++i) {
        const SequenceEntry& entry = find_on_device(call, handles[i]);
        num_pages = std::max(num_pages, lists[sequences.index_of(entry)].pages.size());
    }
    return static_cast<int64_t>(num_pages);
}

void PageAllocator::State::write_page_table(const Sequence* handles, int64_t count, int32_t* page_table,
                                            int64_t max_pages, int32_t* seq_lens, int64_t group) {
    for (int64_t i = 0; i < count; ++i) {
        const SequenceEntry& entry = find_on_device("page_table", handles[i]);
        const PageList& list = groups[group][sequences.index_of(entry)];
        int32_t* row = page_table + i * max_pages;
        list.write(row);
        std::fill(row + list.pages.size(), row + max_pages, -1);
        seq_lens[i] = entry.length;
    }
}

int64_t PageAllocator::max_pages(const Sequence* sequences, int64_t count, int64_t group) const {
    std::lock_guard lock(state_->mutex);
    return state_->max_pages("max_pages", sequences, count, group);
}

void PageAllocator::write_page_table(const Sequence* sequences, int64_t count, int32_t* page_table,
                                     int64_t max_pages, int32_t* seq_lens, int64_t group) const {
    std::lock_guard lock(state_->mutex);
    const int64_t num_pages = state_->max_pages("page_table", sequences, count, group);
    if (max_pages < num_pages) {
        fail<ValueError>("page_table", "max_pages (", max_pages, ") must be at least ", num_pages,
                         ", the pages of the longest sequence");
    }
    state_->write_page_table(sequences, count, page_table, max_pages, seq_lens, group);
}

PageTable PageAllocator::page_table(const Sequence* sequences, int64_t count, int64_t group) const {
    std::lock_guard lock(state_->mutex);
    PageTable table;
    table.max_pages = state_->max_pages("page_table", sequences, count, group);
    table.page_table.resize(static_cast<size_t>(count) * static_cast<size_t>(table.max_pages));
    table.seq_lens.resize(static_cast<size_t>(count));
    state_->write_page_table(sequences, count, table.page_table.data(), table.max_pages,
                             table.seq_lens.data(), group);
    return table;
}

int64_t PageAllocator::shared_prefix_len(const Sequence* sequences, int64_t count, int64_t num_queries,
                                         int64_t group) const {
    std::lock_guard lock(state_->mutex);
    const PageLists& lists = state_->group_at("shared_prefix_len", group);
    check_not_negative("shared_prefix_len", "count", count);
    check_not_negative("shared_prefix_len", "num_queries", num_queries);
    const std::vector<int32_t>* first = nullptr;
    int64_t num_shared = 0;
    for (int64_t i = 0; i < count; ++i) {
        const SequenceEntry& entry = state_->find_on_device("shared_prefix_len", sequences[i]);
        if (first && entry.length == 0) continue;
        const PageList& list = lists[state_->sequences.index_of(entry)];
        const int64_t most = std::max<int64_t>(entry.length - num_queries, 0) / lists.page_size();
        if (!first) {
            first = &list.pages;
            num_shared = list.num_returned > 0 ? 0 : most;
        }
        num_shared = std::min(num_shared, most);
        const auto end = std::mismatch(first->begin(), first->begin() + num_shared, list.pages.begin()).first;
        num_shared = end - first->begin();
    }
    return num_shared * lists.page_size();
}

std::vector<PageCopy> PageAllocator::take_copies(int64_t group) {
    std::lock_guard lock(state_->mutex);
    PagePool& pool = state_->group_at("take_copies", group).pool;
    std::vector<PageCopy> copies(static_cast<size_t>(pool.num_pending_copies()));
    pool.take_copies(copies.data());
    return copies;
}

int64_t PageAllocator::num_groups() const { return static_cast<int64_t>(state_->groups.size()); }
int64_t PageAllocator::num_pages(int64_t group) const {
    return state_->group_at("num_pages", group).pool.num_pages();
}
int64_t PageAllocator::page_size(int64_t group) const {
    return state_->group_at("page_size", group).page_size();
}
int64_t PageAllocator::num_free_pages(int64_t group) const {
    std::lock_guard lock(state_->mutex);
    return state_->group_at("num_free_pages", group).pool.num_free();
}

PageAllocatorStats PageAllocator::stats(int64_t group) const {
    std::lock_guard lock(state_->mutex);
    const PageLists& lists = state_->group_at("stats", group);
    const PagePool& pool = lists.pool;
    const int64_t page_size = lists.page_size();
    PageAllocatorStats stats{};
    stats.num_pages = pool.num_pages();
    stats.page_size = page_size;
    stats.num_sequences = state_->sequences.size();
    stats.num_free_pages = pool.num_free();
    stats.num_used_pages = stats.num_pages - stats.num_free_pages;
    stats.num_shared_pages = pool.num_shared();

    // Every held page is full but those that are the partly filled last page of each of their holders.
    stats.num_stored_tokens = pool.num_held() * page_size;
    struct Tail {
        int32_t num_holders = 0;  // that fill the page partly
        int64_t num_filled = 0;   // by the one that fills it most
    };
    std::map<int32_t, Tail> shared_tails;
    const std::vector<SequenceEntry>& entries = state_->sequences.entries();
    for (size_t index = 0; index < entries.size(); ++index) {
        stats.num_tokens += entries[index].length;
        const int64_t num_filled = entries[index].length % page_size;
        if (num_filled == 0) continue;
        const int32_t page = lists[index].pages.back();
        if (PageList::is_on_host(page)) continue;
        if (!pool.is_shared(page)) {
            stats.num_stored_tokens -= page_size - num_filled;
        } else {
            Tail& tail = shared_tails[page];
            ++tail.num_holders;
            tail.num_filled = std::max(tail.num_filled, num_filled);
        }
    }
    for (const auto& [page, tail] : shared_tails) {
        if (tail.num_holders == pool.num_holders(page))
            stats.num_stored_tokens -= page_size - tail.num_filled;
    }

    const int64_t num_slots = stats.num_used_pages * page_size;
    if (num_slots > 0) {
        stats.waste_percent =
            100.0 * static_cast<double>(num_slots - stats.num_stored_tokens) / static_cast<double>(num_slots);
    }
    return stats;
}

void PageAllocator::write_page_map(int64_t* map, int64_t group) const {
    std::lock_guard lock(state_->mutex);
    const PageLists& lists = state_->group_at("page_map", group);
    const PagePool& pool = lists.pool;
    pool.write_states(map);
    const std::vector<SequenceEntry>& entries = state_->sequences.entries();
    for (size_t index = 0; index < entries.size(); ++index) {
        if (!SequenceTable::is_live(entries[index])) continue;
        for (int32_t page : lists[index].pages) {
            if (page >= 0 && !pool.is_shared(page)) map[page] = static_cast<int64_t>(entries[index].handle);
        }
    }
}

void PageAllocator::check_invariants() const {
    std::lock_guard lock(state_->mutex);
    state_->sequences.check();
    for (size_t g = 0; g < state_->groups.size(); ++g) {
        std::vector<int32_t> reserved, reserved_on_host;
        for (const State::Flight& flight : state_->flights) {
            for (PageCopy copy : flight.copies[g]) {
                reserved.push_back(flight.leaves ? copy.from : copy.to);
                reserved_on_host.push_back(flight.leaves ? copy.to : copy.from);
            }
            if (g == 0) reserved.insert(reserved.end(), flight.kept.begin(), flight.kept.end());
        }
        state_->groups[g].check(state_->sequences, reserved, reserved_on_host);
    }
    if (state_->cache) state_->check_stored();
}

}  // namespace octavo
