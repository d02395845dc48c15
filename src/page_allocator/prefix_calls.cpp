// The calls of PageAllocator that find pages by their tokens, and the moments when pages get stored. The
// prefix cache is of group 0; pages of further groups are stored beside those of group 0 with the same
// tokens.
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
        const int32_t position = entry.num_stored;
        // A page that copies still read or write cannot be given back, or is not written.
        for (const PageLists& group : groups) {
            const int32_t page = group[index].pages[position];
            if (page != PageList::kReturned && group.pool.has_pending_copy(page)) return false;
        }
        const int32_t parent = position == 0 ? PrefixCache::root(entry.cache_namespace) : pages[position - 1];
        const int32_t stored = cache->store(pages[position], parent);
        if (stored == pages[position]) {
            lists.pool.store(stored);
        } else if (lists.pool.is_shared(pages[position])) {
            return false;  // exchanging it would take a page and free none
        } else {
            lists.replace(index, static_cast<size_t>(position), stored);
        }
        for (size_t g = 1; g < groups.size(); ++g) store_beside(g, index, position);
    }
    return true;
}

void PageAllocator::State::store_beside(size_t g, size_t index, int32_t position) noexcept {
    PageLists& lists = groups[g];
    CompanionPages& companions = *cache->companions()[g - 1];
    const int32_t page = lists[index].pages[position], owner = groups[0][index].pages[position];
    if (page == PageList::kReturned) return;
    const int32_t known = companions.find(owner);
    if (known == PrefixCache::kNone) {
        companions.store(page, owner);
        lists.pool.store(page);
    } else if (known != page && !lists.pool.is_shared(page)) {
        lists.replace(index, static_cast<size_t>(position), known);
    }
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
            for (size_t g = 1; g < groups.size(); ++g) check_beside(g, groups[g][index].pages[i], page);
            parent = page;
        }
    }
    for (size_t g = 1; g < groups.size(); ++g) {
        for (int32_t owner = 0; owner < pool.num_pages(); ++owner) {
            const int32_t page = cache->companions()[g - 1]->find(owner);
            if (page == PrefixCache::kNone) continue;
            if (!pool.is_stored(owner) || !groups[g].pool.is_stored(page)) {
                fail<Error>("check_invariants", "page ", page, in_group(g), " is beside page ", owner,
                            ", but one of them is not stored");
            }
            check_beside(g, page, owner);
        }
    }
}

void PageAllocator::State::check_beside(size_t g, int32_t page, int32_t owner) const {
    if (page < 0 || !groups[g].pool.is_stored(page)) return;
    const int32_t known = cache->companions()[g - 1]->owner(page);
    if (known != owner) {
        fail<Error>("check_invariants", "page ", page, in_group(g), " is held beside page ", owner,
                    ", but stored beside page ", known);
    }
}

PrefixCache& PageAllocator::State::cache_for(const char* call) {
    if (!cache) fail<ValueError>(call, "the allocator was made without a prefix cache");
    return *cache;
}

int64_t PageAllocator::State::find_prefix(const char* call, const int32_t* tokens, int64_t count,
                                          const std::string& name, Wanted wanted) {
    const PrefixCache& prefixes = cache_for(call);
    check_not_negative(call, "count", count);
    if (count > kMaxInt32) fail<ValueError>(call, "count (", count, ") must be at most ", kMaxInt32);
    if (wanted == Wanted::all_but_the_last) count = std::max<int64_t>(count - 1, 0);
    store_waiting();
    found.clear();
    const int32_t space = prefixes.find_namespace(name);
    if (space == PrefixCache::kNone) return 0;
    int64_t length = prefixes.match(space, tokens, count, wanted != Wanted::full_pages, &found);
    // Further groups need what their layers see from there on; one that has not all of it shortens all.
    for (bool is_shorter = groups.size() > 1; is_shorter;) {
        is_shorter = false;
        for (size_t g = 1; g < groups.size(); ++g) {
            const CompanionPages& companions = *prefixes.companions()[g - 1];
            for (size_t i = found.size(); i-- > groups[g].num_behind(length, found.size());) {
                if (companions.find(found[i]) != CompanionPages::kNone) continue;
                found.resize(i);
                length = static_cast<int64_t>(i) * groups[g].page_size();
                is_shorter = true;
            }
        }
    }
    return length;
}

Sequence PageAllocator::State::create_cached(const char* call, const int32_t* tokens, int64_t count,
                                             const std::string& name, Wanted wanted) {
    PrefixCache& prefixes = cache_for(call);
    const size_t index = reserve_sequences(call, 1)[0];
    const int64_t length = find_prefix(call, tokens, count, name, wanted);
    for (PageLists& lists : groups) lists.reserve(index, found.size());
    const int32_t space = prefixes.use_namespace(name);

    SequenceEntry& entry = sequences.create();
    groups[0].hold(index, found.data(), found.size());
    entry.cache_namespace = space;
    entry.is_pin = wanted == Wanted::full_pages;
    entry.length = entry.num_known = static_cast<int32_t>(length);
    entry.num_stored = static_cast<int32_t>(length / groups[0].page_size());
    const std::vector<int32_t>& pages = groups[0][index].pages;
    for (size_t g = 1; g < groups.size(); ++g) {
        const size_t num_behind = groups[g].num_behind(length, pages.size());
        for (size_t i = 0; i < pages.size(); ++i) {
            found[i] = i < num_behind ? PageList::kReturned : prefixes.companions()[g - 1]->find(pages[i]);
        }
        groups[g].hold(index, found.data(), found.size());
    }
    return Sequence{entry.handle};
}

Sequence PageAllocator::create(const int32_t* tokens, int64_t count, const std::string& cache_namespace) {
    std::lock_guard lock(state_->mutex);
    const Sequence sequence =
        state_->create_cached("create", tokens, count, cache_namespace, State::Wanted::all_but_the_last);
    state_->num_queried_tokens += count;
    state_->num_hit_tokens += state_->sequences.find("create", sequence).length;
    return sequence;
}

Sequence PageAllocator::pin(const int32_t* tokens, int64_t count, const std::string& cache_namespace) {
    std::lock_guard lock(state_->mutex);
    return state_->create_cached("pin", tokens, count, cache_namespace, State::Wanted::full_pages);
}

void PageAllocator::unpin(Sequence pin) {
    std::lock_guard lock(state_->mutex);
    const SequenceEntry& entry = state_->sequences.find("unpin", pin);
    if (!entry.is_pin)
        fail<ValueError>("unpin", "sequence ", entry.handle, " is not a pin; free() ends sequences");
    state_->free("unpin", pin);
}

int64_t PageAllocator::num_cached_tokens(const int32_t* tokens, int64_t count,
                                         const std::string& cache_namespace) const {
    std::lock_guard lock(state_->mutex);
    return state_->find_prefix("num_cached_tokens", tokens, count, cache_namespace, State::Wanted::tokens);
}

std::vector<CacheEvent> PageAllocator::take_events(int64_t* num_lost) {
    std::lock_guard lock(state_->mutex);
    PrefixCache& prefixes = state_->cache_for("take_events");
    int64_t lost = 0;
    std::vector<CacheEvent> events = prefixes.take_events(&lost);
    if (num_lost) *num_lost = lost;
    return events;
}

PrefixCacheStats PageAllocator::cache_stats() const {
    std::lock_guard lock(state_->mutex);
    const PrefixCache& prefixes = state_->cache_for("cache_stats");
    return {prefixes.num_stored(), prefixes.num_idle(), prefixes.num_evicted(), state_->num_queried_tokens,
            state_->num_hit_tokens};
}

}  // namespace octavo
