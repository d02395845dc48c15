// Sequences that leave the device for host memory and come back. The allocator says which pages to copy;
// until the caller confirms that they are, no page of either side is handed out and none of the sequences can
// be used.
#include "page_allocator/allocator_state.h"

#include <algorithm>

namespace octavo {

void PageAllocator::State::throw_not_on_device(const char* call, const SequenceEntry& entry) {
    const bool arrives = entry.place == SequenceEntry::Place::arriving;
    fail<ValueError>(call, "sequence ", entry.handle,
                     arrives ? " is on its way from the host: confirm() its transfer first"
                             : " is preempted: resume() it first");
}

std::vector<size_t> PageAllocator::State::find_all_at(const char* call, const Sequence* handles,
                                                      int64_t count, SequenceEntry::Place place) {
    check_not_negative(call, "count", count);
    std::vector<size_t> entries;
    ++num_plans;
    for (int64_t i = 0; i < count; ++i) {
        SequenceEntry& entry = sequences.find(call, handles[i]);
        if (entry.planned == num_plans) {
            fail<ValueError>(call, "sequence ", entry.handle, " is given twice (the second time as seqs[", i,
                             "])");
        }
        entry.planned = num_plans;
        if (entry.place != place) {
            if (place == SequenceEntry::Place::device) throw_not_on_device(call, entry);
            fail<ValueError>(call, "sequence ", entry.handle,
                             entry.place == SequenceEntry::Place::leaving
                                 ? " is on its way to the host: confirm() its transfer first"
                                 : " is not preempted");
        }
        entries.push_back(sequences.index_of(entry));
    }
    return entries;
}

int32_t PageAllocator::State::token_page(int32_t page, bool on_host) const {
    return on_host ? groups[0].pool.num_pages() + page : page;
}

std::vector<std::unordered_map<int32_t, int32_t>> PageAllocator::State::find_intact(
    const std::vector<size_t>& entries) const {
    std::vector<std::unordered_map<int32_t, int32_t>> intact(groups.size());
    if (!cache) return intact;
    for (size_t index : entries) {
        const SequenceEntry& entry = sequences.entries()[index];
        int32_t parent = PrefixCache::root(entry.cache_namespace);
        for (int32_t i = 0; i < entry.num_known / groups[0].page_size(); ++i) {
            int32_t page = groups[0][index].pages[i];
            if (PageList::is_on_host(page)) {
                const int32_t on_host = page;
                page = cache->find_below(parent, cache->tokens(token_page(~on_host, true)));
                if (page == PrefixCache::kNone) break;
                intact[0].emplace(on_host, page);
            } else if (!groups[0].pool.is_stored(page) || cache->parent(page) != parent) {
                break;
            }
            for (size_t g = 1; g < groups.size(); ++g) {
                const int32_t beside = groups[g][index].pages[i];
                const int32_t known = cache->companions()[g - 1]->find(page);
                if (PageList::is_on_host(beside) && known != CompanionPages::kNone)
                    intact[g].emplace(beside, known);
            }
            parent = page;
        }
    }
    return intact;
}

Transfer PageAllocator::State::start(const std::vector<size_t>& entries, std::vector<PageLists::Move> moves,
                                     bool leaves) {
    Transfer transfer{next_transfer, {}};
    Flight flight{next_transfer, leaves, {}, {}, {}};
    for (size_t index : entries) flight.sequences.push_back(Sequence{sequences[index].handle});
    flight.copies.resize(moves.size());
    for (const PageLists::Move& move : moves) transfer.copies.emplace_back(move.copies.size());
    if (cache && leaves) {
        size_t num_pages = 0;
        for (size_t index : entries) num_pages += groups[0][index].pages.size();
        flight.kept.reserve(num_pages);
    }
    flights.reserve(flights.size() + 1);

    ++next_transfer;
    for (size_t g = 0; g < groups.size(); ++g) {
        leaves ? groups[g].leave(entries, moves[g]) : groups[g].arrive(entries, moves[g]);
        std::copy(moves[g].copies.begin(), moves[g].copies.end(), transfer.copies[g].begin());
        flight.copies[g] = std::move(moves[g].copies);
    }
    if (cache) {
        for (PageCopy copy : flight.copies[0]) {
            cache->copy_tokens(token_page(copy.from, !leaves), token_page(copy.to, leaves),
                               groups[0].page_size());
        }
    }
    for (size_t index : entries) {
        SequenceEntry& entry = sequences[index];
        entry.place = leaves ? SequenceEntry::Place::leaving : SequenceEntry::Place::arriving;
        if (!cache) continue;
        // Pages that stayed may be stored, and those that needed no copy are.
        const std::vector<int32_t>& pages = groups[0][index].pages;
        int32_t parent = PrefixCache::root(entry.cache_namespace);
        entry.num_stored = 0;
        while (entry.num_stored < entry.num_known / groups[0].page_size()) {
            const int32_t page = pages[entry.num_stored];
            if (page < 0 || !groups[0].pool.is_stored(page) || cache->parent(page) != parent) break;
            parent = page;
            ++entry.num_stored;
        }
        if (!leaves) {
            wait_to_store(index);
            continue;
        }
        for (int32_t page : pages) {
            if (page < 0) continue;
            groups[0].pool.reserve(page);
            flight.kept.push_back(page);
        }
    }
    flights.push_back(std::move(flight));
    return transfer;
}

Transfer PageAllocator::preempt(const Sequence* handles, int64_t count) {
    constexpr const char* call = "preempt";
    std::lock_guard lock(state_->mutex);
    const std::vector<size_t> entries =
        state_->find_all_at(call, handles, count, SequenceEntry::Place::device);
    for (size_t index : entries) {
        const SequenceEntry& entry = state_->sequences[index];
        if (entry.is_pin)
            fail<ValueError>(call, "sequence ", entry.handle, " is a pin, whose pages stay on the device");
    }
    std::vector<PageLists::Move> moves;
    for (size_t g = 0; g < state_->groups.size(); ++g) {
        const PageLists& lists = state_->groups[g];
        if (lists.pool.num_pending_copies() > 0) {
            fail<ValueError>(call, lists.pool.num_pending_copies(), " copies are pending",
                             state_->in_group(g), ": take and make them first");
        }
        moves.push_back(lists.plan_leaving(entries));
        const auto num_pages = static_cast<int64_t>(moves.back().copies.size());
        if (num_pages > lists.host.num_free()) {
            fail<OutOfPages>(call, "needs ", num_pages, " host pages, ", lists.host.num_free(), " free",
                             state_->in_group(g));
        }
    }
    if (state_->cache) {
        for (size_t index : entries) state_->store_pages(index);
        for (size_t g = 0; g < moves.size(); ++g) {  // some may have been exchanged
            moves[g] = state_->groups[g].plan_leaving(entries);
        }
    }
    return state_->start(entries, std::move(moves), true);
}

Transfer PageAllocator::resume(const Sequence* handles, int64_t count) {
    constexpr const char* call = "resume";
    std::lock_guard lock(state_->mutex);
    const std::vector<size_t> entries = state_->find_all_at(call, handles, count, SequenceEntry::Place::host);
    std::vector<PageLists::Move> moves;
    auto intact = state_->find_intact(entries);
    for (size_t g = 0; g < state_->groups.size(); ++g) {
        const PageLists& lists = state_->groups[g];
        moves.push_back(lists.plan_arriving(entries, std::move(intact[g])));
        const int64_t num_pages = lists.num_pages_for(moves.back());
        if (num_pages > lists.pool.num_free()) {
            fail<OutOfPages>(call, "needs ", num_pages, " pages, ", lists.pool.num_free(), " free",
                             state_->in_group(g));
        }
    }
    return state_->start(entries, std::move(moves), false);
}

void PageAllocator::confirm(int64_t transfer) {
    std::lock_guard lock(state_->mutex);
    auto flight = std::find_if(state_->flights.begin(), state_->flights.end(),
                               [transfer](const State::Flight& flight) { return flight.id == transfer; });
    if (flight == state_->flights.end()) {
        fail<ValueError>("confirm", "transfer (", transfer, ") must be one in flight");
    }
    for (size_t g = 0; g < state_->groups.size(); ++g) {
        PageLists& lists = state_->groups[g];
        PagePool& from = flight->leaves ? lists.pool : lists.host;
        PagePool& to = flight->leaves ? lists.host : lists.pool;
        for (size_t i = flight->copies[g].size(); i-- > 0;) {  // last to first, as when they are released
            from.unreserve(flight->copies[g][i].from);
            to.unreserve(flight->copies[g][i].to);
        }
    }
    for (size_t i = flight->kept.size(); i-- > 0;) state_->groups[0].pool.unreserve(flight->kept[i]);
    for (Sequence sequence : flight->sequences) {
        SequenceEntry* entry = state_->sequences.find_live(sequence);  // it may have been freed since
        if (entry) entry->place = flight->leaves ? SequenceEntry::Place::host : SequenceEntry::Place::device;
    }
    state_->flights.erase(flight);
}

int64_t PageAllocator::num_host_pages(int64_t group) const {
    return state_->group_at("num_host_pages", group).host.num_pages();
}

int64_t PageAllocator::num_free_host_pages(int64_t group) const {
    std::lock_guard lock(state_->mutex);
    return state_->group_at("num_free_host_pages", group).host.num_free();
}

}  // namespace octavo
