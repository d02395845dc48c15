// The calls of PageAllocator that find pages by their tokens, and the moments when pages get stored. A prefix
// cache has one group, number 0.
#include "page_allocator/allocator_state.h"

#include <algorithm>

namespace octavo {

void PageAllocator::State::append_tokens(size_t index, int32_t num_new, const int32_t* tokens) noexcept {
    SequenceEntry& entry = sequences[index];
    if (entry.num_known < entry.length) return;  // it has grown without tokens: what follows cannot be found
    const int32_t page_size = groups[0].page_size();
    for (int32_t done = 0; done < num_new;) {
        const int32_t slot = (entry.num_known + done) % page_size;
        const int32_t count = std::min(page_size - slot, num_new - done);
        const int32_t page = groups[0][index].pages[(entry.num_known + done) / page_size];
        std::copy_n(tokens + done, count, cache->tokens(page) + slot);
        done += count;
    }
    entry.num_known += num_new;
    wait_to_store(index);
}

void PageAllocator::State::wait_to_store(size_t index) noexcept {
    SequenceEntry& entry = sequences[index];
    if (entry.num_known / groups[0].page_size() <= entry.num_stored || entry.is_waiting) return;
    entry.is_waiting = true;
    waiting.push_back(index);
}

bool PageAllocator::State::store_pages(size_t index) noexcept {
    SequenceEntry& entry = sequences[index];
    if (entry.place != SequenceEntry::Place::device) return false;
    PageLists& lists = groups[0];
    const std::vector<int32_t>& pages = lists[index].pages;
    for (; entry.num_stored < entry.num_known / lists.page_size(); ++entry.num_stored) {
        const int32_t page = pages[entry.num_stored];
        // A page that copies still read or write cannot be given back, or is not written.
        if (lists.pool.has_pending_copy(page)) return false;
        const int32_t parent =
            entry.num_stored == 0 ? PrefixCache::root(entry.cache_namespace) : pages[entry.num_stored - 1];
        const int32_t stored = cache->store(page, parent);
        if (stored == page) {
            lists.pool.store(page);
        } else if (lists.pool.is_shared(page)) {
            return false;  // exchanging it would take a page and free none
        } else {
            lists.replace(index, static_cast<size_t>(entry.num_stored), stored);
        }
    }
    return true;
}

void PageAllocator::State::store_waiting() noexcept {
    auto is_done = [this](size_t index) {
        SequenceEntry& entry = sequences[index];
        if (!SequenceTable::is_live(entry) || store_pages(index)) entry.is_waiting = false;
        return !entry.is_waiting;
    };
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(), is_done), waiting.end());
}

void PageAllocator::State::set_known(SequenceEntry& to, const SequenceEntry& from) noexcept {
    to.cache_namespace = from.cache_namespace;
    to.num_known = from.num_known;
    to.num_stored = from.num_stored;
}

void PageAllocator::State::check_stored() const {
    const PagePool& pool = groups[0].pool;
    for (size_t index = 0; index < sequences.entries().size(); ++index) {
        const SequenceEntry& entry = sequences.entries()[index];
        if (entry.num_known > entry.length || entry.num_stored > entry.num_known / groups[0].page_size()) {
            fail<Error>("check_invariants", "sequence ", entry.handle, " has ", entry.length, " tokens, ",
                        entry.num_known, " known and ", entry.num_stored, " pages of them stored");
        }
        int32_t parent = PrefixCache::root(entry.cache_namespace);
        for (int32_t i = 0; i < entry.num_stored; ++i) {
            const int32_t page = groups[0][index].pages[i];
            if (!pool.is_stored(page) || cache->parent(page) != parent) {
                fail<Error>("check_invariants", "sequence ", entry.handle, " holds page ", page,
                            " as stored below another than the page before it");
            }
            parent = page;
        }
    }
}

PrefixCache& PageAllocator::State::cache_for(const char* call) {
    if (!cache) fail<ValueError>(call, "the allocator was made without a prefix cache");
    return *cache;
}

Sequence PageAllocator::State::create_cached(const char* call, const int32_t* tokens, int64_t count,
                                             const std::string& name, bool partly) {
    PrefixCache& prefixes = cache_for(call);
    check_not_negative(call, "count", count);
    if (count > kMaxInt32) fail<ValueError>(call, "count (", count, ") must be at most ", kMaxInt32);
    const size_t index = reserve_sequences(call, 1)[0];
    store_waiting();
    found.clear();
    const int32_t known_space = prefixes.find_namespace(name);
    int64_t num_found = 0;
    if (known_space != PrefixCache::kNone)
        num_found = prefixes.match(known_space, tokens, count, partly, &found);
    groups[0].reserve(index, found.size());
    const int32_t space = prefixes.use_namespace(name);

    SequenceEntry& entry = sequences.create();
    groups[0].hold(index, found.data(), found.size());
    entry.cache_namespace = space;
    entry.length = entry.num_known = static_cast<int32_t>(num_found);
    entry.num_stored = static_cast<int32_t>(num_found / groups[0].page_size());
    return Sequence{entry.handle};
}

Sequence PageAllocator::create(const int32_t* tokens, int64_t count, const std::string& cache_namespace) {
    std::lock_guard lock(state_->mutex);
    const Sequence sequence = state_->create_cached("create", tokens, count, cache_namespace, true);
    state_->num_queried_tokens += count;
    state_->num_hit_tokens += state_->sequences.find("create", sequence).length;
    return sequence;
}

Sequence PageAllocator::pin(const int32_t* tokens, int64_t count, const std::string& cache_namespace) {
    std::lock_guard lock(state_->mutex);
    return state_->create_cached("pin", tokens, count, cache_namespace, false);
}

void PageAllocator::unpin(Sequence pin) {
    std::lock_guard lock(state_->mutex);
    state_->free("unpin", pin);
}

int64_t PageAllocator::num_cached_tokens(const int32_t* tokens, int64_t count,
                                         const std::string& cache_namespace) const {
    std::lock_guard lock(state_->mutex);
    PrefixCache& prefixes = state_->cache_for("num_cached_tokens");
    check_not_negative("num_cached_tokens", "count", count);
    state_->store_waiting();
    state_->found.clear();
    const int32_t space = prefixes.find_namespace(cache_namespace);
    return space == PrefixCache::kNone ? 0 : prefixes.match(space, tokens, count, true, &state_->found);
}

std::vector<CacheEvent> PageAllocator::take_events(int64_t* num_lost) {
    std::lock_guard lock(state_->mutex);
    PrefixCache& prefixes = state_->cache_for("take_events");
    state_->store_waiting();
    int64_t lost = 0;
    std::vector<CacheEvent> events = prefixes.take_events(&lost);
    if (num_lost) *num_lost = lost;
    return events;
}

PrefixCacheStats PageAllocator::cache_stats() const {
    std::lock_guard lock(state_->mutex);
    const PrefixCache& prefixes = state_->cache_for("cache_stats");
    state_->store_waiting();
    return {prefixes.num_stored(), prefixes.num_idle(), prefixes.num_evicted(), state_->num_queried_tokens,
            state_->num_hit_tokens};
}

}  // namespace octavo
