// Growing sequences, one or a batch: first see that all of it can be done, then do it.
#include "page_allocator/allocator_state.h"
#include "page_allocator/step_rows.h"

#include <algorithm>
#include <numeric>
#include <sstream>

namespace octavo {

void PageAllocator::State::plan(const char* call, const Sequence* handles, const int32_t* n, int64_t count,
                                bool is_question) {
    const size_t num_groups = groups.size();
    ++num_plans;
    planned.clear();
    num_new_tokens.clear();
    unfit.clear();
    is_unfit.assign(static_cast<size_t>(count), false);
    planned.reserve(static_cast<size_t>(count));
    num_new_tokens.reserve(static_cast<size_t>(count));
    unfit.reserve(static_cast<size_t>(count));
    growing.reserve(static_cast<size_t>(count) * num_groups);

    for (int64_t i = 0; i < count; ++i) {
        SequenceEntry& entry = find_on_device(call, handles[i]);
        if (entry.planned == num_plans) {
            fail<ValueError>(call, "sequence ", entry.handle, " is given twice (the second time as seqs[", i,
                             "])");
        }
        if (entry.is_pin)
            fail<ValueError>(call, "sequence ", entry.handle, " is a pin, which cannot grow; fork it");
        entry.planned = num_plans;
        const int32_t num_new = n ? n[i] : 1;
        if (num_new < 0) fail<ValueError>(call, "num_new_tokens[", i, "] (", num_new, ") must be at least 0");
        if (num_new > kMaxInt32 - entry.length) {
            fail<ValueError>(call, "num_new_tokens[", i, "] (", num_new, ") and the sequence's length (",
                             entry.length, ") must add up to at most ", kMaxInt32);
        }
        planned.push_back(sequences.index_of(entry));
        num_new_tokens.push_back(num_new);
    }

    size_t num_returns = 0;
    for (size_t g = 0; g < num_groups; ++g) {
        for (size_t i = 0; i < planned.size(); ++i) {
            const PageLists::Behind behind = pages_behind(g, i);
            num_returns += behind.end - behind.begin;
        }
    }
    left_pages.reserve(static_cast<size_t>(count) * num_groups + num_returns);
    early_pages.reserve(num_returns);
    last_holders.reserve(num_returns);
    dropped_copies.reserve(num_returns);
    // A sequence that does not fit returns no pages either, on which others may have counted.
    size_t num_unfit = 0;
    do {
        num_unfit = unfit.size();
        plan_pages(num_returns > 0, is_question);
    } while (num_returns > 0 && unfit.size() > num_unfit && unfit.size() < planned.size());
    std::sort(unfit.begin(), unfit.end());
    if (!unfit.empty() || is_question) return;
    for (NewPages grown : growing) groups[grown.group].reserve(grown.entry, grown.num_pages);
    for (size_t g = 0; g < num_groups; ++g) groups[g].pool.reserve_copies(plans[g].num_copies);
}

void PageAllocator::State::plan_pages(bool has_returns, bool is_question) noexcept {
    const size_t num_groups = groups.size();
    growing.clear();
    left_pages.clear();
    early_pages.clear();
    for (size_t g = 0; g < num_groups; ++g) {
        const int64_t num_behind = has_returns ? plan_returns(g) : 0;
        plans[g] = {groups[g].pool.num_free() + num_behind, num_behind, 0, 0, 0};
    }
    for (size_t i = 0; i < planned.size(); ++i) {
        const size_t index = planned[i];
        const int32_t length = sequences.entries()[index].length;
        bool fits = !is_unfit[i];
        for (size_t g = 0; g < num_groups; ++g) {
            fits = fits && groups[g].plan(index, length, num_new_tokens[i]).num_pages() <= plans[g].num_free;
        }
        fits = fits || is_question;
        if (!fits && !is_unfit[i]) {
            is_unfit[i] = true;
            unfit.push_back(static_cast<int64_t>(i));
        }
        for (size_t g = 0; g < num_groups; ++g) {
            PageLists& lists = groups[g];
            const PageLists::Growth growth = lists.plan(index, length, num_new_tokens[i]);
            const std::vector<int32_t>& pages = lists[index].pages;
            const size_t num_pages = pages.size() + static_cast<size_t>(growth.num_new_pages);
            plans[g].max_pages = std::max(plans[g].max_pages, static_cast<int64_t>(num_pages));
            if (!fits) {
                plans[g].num_missing += growth.num_pages();
                continue;
            }
            plans[g].num_free -= growth.num_pages();
            if (growth.num_new_pages > 0) growing.push_back({g, index, num_pages});
            plans[g].num_copies += growth.copies_tail;
            if (growth.copies_tail && lists.pool.is_shared(pages.back())) {
                // From here on this plan counts one holder less: the last one to grow keeps the page.
                lists.pool.leave(pages.back());
                left_pages.emplace_back(g, pages.back());
            }
        }
    }
    for (auto [g, page] : left_pages) groups[g].pool.hold(page);
    for (auto [g, page] : early_pages) groups[g].pool.unstore(page);
}

PageLists::Behind PageAllocator::State::pages_behind(size_t group, size_t i) const {
    const PageLists& lists = groups[group];
    const int32_t length = sequences.entries()[planned[i]].length;
    return lists.behind(planned[i], length, lists.plan(planned[i], length, num_new_tokens[i]).num_new_pages);
}

int64_t PageAllocator::State::plan_returns(size_t group) noexcept {
    PageLists& lists = groups[group];
    PagePool& pool = lists.pool;
    int64_t num_freed = 0;
    last_holders.clear();
    dropped_copies.clear();
    for (size_t i = 0; i < planned.size(); ++i) {
        if (is_unfit[i]) continue;
        const SequenceEntry& entry = sequences.entries()[planned[i]];
        const int32_t num_full = cache ? entry.num_known / lists.page_size() : 0;
        const PageLists::Behind behind = pages_behind(group, i);
        for (size_t position = behind.begin; position < behind.end; ++position) {
            const int32_t page = lists[planned[i]].pages[position];
            if (pool.is_shared(page)) {
                // Once it is stored, the last holder copies it before writing to it. Should it not be stored
                // after all, since another page is already, the plan has a page to spare.
                const auto i_page = static_cast<int32_t>(position);
                if (i_page >= entry.num_stored && i_page < num_full && !pool.is_stored(page)) {
                    pool.store(page);
                    early_pages.emplace_back(group, page);
                }
                pool.leave(page);
                left_pages.emplace_back(group, page);
            } else if (pool.num_readers(page) > 0) {
                last_holders.push_back(page);
            } else {
                ++num_freed;
                if (const int32_t source = pool.source_of(page); source >= 0)
                    dropped_copies.push_back(source);
            }
        }
    }
    // A page that nobody holds any more is free when the last pending copy that reads it is dropped.
    std::sort(dropped_copies.begin(), dropped_copies.end());
    for (size_t i = 0, end = 0; i < dropped_copies.size(); i = end) {
        const int32_t source = dropped_copies[i];
        while (end < dropped_copies.size() && dropped_copies[end] == source) ++end;
        const bool is_held =
            pool.num_holders(source) > 0 &&
            std::find(last_holders.begin(), last_holders.end(), source) == last_holders.end();
        num_freed += !is_held && pool.num_readers(source) == static_cast<int32_t>(end - i);
    }
    return num_freed;
}

void PageAllocator::State::commit(const int32_t* tokens) noexcept {
    if (cache) store_waiting();
    // First of all, as others may take these pages. Queries see from the first new token's window on.
    for (size_t g = 0; g < groups.size(); ++g) {
        for (size_t i = 0; i < planned.size(); ++i) groups[g].return_pages(planned[i], pages_behind(g, i));
    }
    for (size_t i = 0; i < planned.size(); ++i) {
        const size_t index = planned[i];
        SequenceEntry& entry = sequences[index];
        for (PageLists& lists : groups) {
            const PageLists::Growth growth = lists.plan(index, entry.length, num_new_tokens[i]);
            const int32_t tail = growth.copies_tail ? lists[index].pages.back() : 0;
            lists.grow(index, growth);
            if (cache && growth.copies_tail && &lists == groups.data()) {
                const size_t last = static_cast<size_t>(entry.length / lists.page_size());
                cache->copy_tokens(tail, lists[index].pages[last], entry.length % lists.page_size());
            }
        }
        if (tokens) {
            append_tokens(index, num_new_tokens[i], tokens);
            tokens += num_new_tokens[i];
        }
        entry.length += num_new_tokens[i];
    }
}

bool PageAllocator::State::grow_one(const char* call, Sequence sequence, int64_t n) {
    const SequenceEntry& entry = find_on_device(call, sequence);
    check_not_negative(call, "n", n);
    if (n > kMaxInt32 - entry.length) {
        fail<ValueError>(call, "n (", n, ") and the sequence's length (", entry.length,
                         ") must add up to at most ", kMaxInt32);
    }
    const auto num_new = static_cast<int32_t>(n);
    plan(call, &sequence, &num_new, 1);
    if (!unfit.empty()) return false;
    commit(nullptr);
    return true;
}

void PageAllocator::extend(Sequence sequence, int64_t n) {
    std::lock_guard lock(state_->mutex);
    if (state_->grow_one("extend", sequence, n)) return;
    const SequenceEntry& entry = state_->sequences.find("extend", sequence);
    for (size_t g = 0; g < state_->groups.size(); ++g) {
        const PageLists& lists = state_->groups[g];
        const PageLists::Growth growth =
            lists.plan(state_->sequences.index_of(entry), entry.length, static_cast<int32_t>(n));
        const int64_t num_free = lists.pool.num_free() + state_->plans[g].num_behind;
        if (growth.num_pages() <= num_free) continue;
        fail<OutOfPages>("extend", "needs ", growth.num_pages(), " pages (", growth.num_new_pages, " new, ",
                         int{growth.copies_tail}, " copy-on-write), ", num_free, " free",
                         state_->in_group(g));
    }
}

bool PageAllocator::try_extend(Sequence sequence, int64_t n) {
    std::lock_guard lock(state_->mutex);
    return state_->grow_one("try_extend", sequence, n);
}

int64_t PageAllocator::needed(const Sequence* sequences, const int32_t* num_new_tokens, int64_t count,
                              int64_t group) const {
    constexpr const char* call = "needed";
    std::lock_guard lock(state_->mutex);
    const int64_t num_free = state_->group_at(call, group).pool.num_free();
    check_not_negative(call, "count", count);
    state_->plan(call, sequences, num_new_tokens, count, true);
    return std::max<int64_t>(num_free - state_->plans[group].num_free, 0);
}

void PageAllocator::State::throw_unfit(const char* call, int64_t count) const {
    constexpr size_t kMaxListed = 8;
    const bool is_one = unfit.size() == 1;
    const char* const need = is_one ? " needs " : " need ";
    std::ostringstream text;
    text << call << ": " << unfit.size() << " of " << count << " sequences" << need
         << "pages that are not free: seqs[";
    for (size_t i = 0; i < std::min(unfit.size(), kMaxListed); ++i) text << (i > 0 ? ", " : "") << unfit[i];
    text << (unfit.size() > kMaxListed ? ", ...]" : "]");
    for (size_t g = 0; g < groups.size(); ++g) {
        if (g > 0) text << (is_one ? "; it" : "; they");
        text << need << plans[g].num_missing << ", " << plans[g].num_free << " of the "
             << groups[g].pool.num_free() + plans[g].num_behind << " free pages are left" << in_group(g);
    }
    throw OutOfPages(text.str(), unfit);
}

void PageAllocator::step(const Sequence* sequences, const int32_t* num_new_tokens, int64_t count,
                         StepArrays& arrays, const int32_t* tokens) {
    constexpr const char* call = "step";
    StepArrays::State& out = *arrays.state_;
    std::scoped_lock lock(out.mutex, state_->mutex);
    std::vector<PageLists>& groups = state_->groups;
    if (tokens) state_->cache_for(call);
    check_not_negative(call, "count", count);
    if (count > out.max_batch) {
        fail<ValueError>(call, "there are ", count, " sequences, but the arrays have max_batch (",
                         out.max_batch, ") rows");
    }
    if (out.tables.size() != groups.size()) {
        fail<ValueError>(call, "the arrays have ", out.tables.size(), " page tables, but there are ",
                         groups.size(), " groups");
    }
    state_->plan(call, sequences, num_new_tokens, count);
    if (!state_->unfit.empty()) state_->throw_unfit(call, count);
    for (size_t g = 0; g < groups.size(); ++g) {
        const PageTableArrays& table = out.tables[g].arrays;
        const State::GroupPlan& plan = state_->plans[g];
        if (plan.max_pages > table.max_pages) {
            fail<ValueError>(call, "page_table's max_pages (", table.max_pages, ") must be at least ",
                             plan.max_pages, ", the pages of the longest sequence", state_->in_group(g));
        }
        const int64_t num_copies = groups[g].pool.num_pending_copies() + plan.num_copies;
        if (table.copies && num_copies > table.max_copies) {
            fail<ValueError>(call, "copies' max_copies (", table.max_copies, ") must be at least ",
                             num_copies, state_->in_group(g));
        }
    }
    const std::vector<int32_t>& num_new = state_->num_new_tokens;
    const int64_t num_tokens = std::accumulate(num_new.begin(), num_new.end(), int64_t{0});
    if (num_tokens > kMaxInt32) {
        fail<ValueError>(call, "num_new_tokens adds up to ", num_tokens, "; it may be at most ", kMaxInt32);
    }

    if (out.has_token_rows() && num_tokens > out.tokens.max_tokens) {
        fail<ValueError>(call, "there are ", num_tokens, " new tokens, but the arrays have max_tokens (",
                         out.tokens.max_tokens, ") rows for them");
    }
    for (size_t g = 0; g < out.tokens.slot_mapping.size(); ++g) {
        const int64_t num_slots = int64_t{groups[g].pool.num_pages()} * groups[g].page_size();
        if (out.tokens.slot_mapping[g].int32 && num_slots - 1 > kMaxInt32) {
            fail<ValueError>(call, "slot_mapping must be int64 for ", num_slots, " slots",
                             state_->in_group(g), "; it is int32");
        }
    }

    state_->commit(tokens);
    if (out.allocator != state_->id) out.clear();
    out.allocator = state_->id;
    for (size_t g = 0; g < groups.size(); ++g) {
        StepArrays::State::Table& table = out.tables[g];
        for (int64_t i = 0; i < count; ++i) {
            out.write_row(table, i, static_cast<int32_t>(state_->planned[i]), groups[g][state_->planned[i]]);
        }
        for (int64_t i = count; i < out.num_rows; ++i) out.clear_row(table, i);
        table.num_copies = 0;
        if (table.arrays.copies) {
            table.num_copies = groups[g].pool.num_pending_copies();
            groups[g].pool.take_copies(reinterpret_cast<PageCopy*>(table.arrays.copies));
        }
    }
    for (int64_t i = 0; i < count; ++i) out.seq_lens[i] = state_->sequences[state_->planned[i]].length;
    std::fill(out.seq_lens + count, out.seq_lens + std::max(count, out.num_rows), 0);
    int32_t total = 0;
    if (out.cu_seqlens_q) out.cu_seqlens_q[0] = 0;
    for (int64_t i = 0; i < count; ++i) {
        const size_t index = state_->planned[i];
        const int32_t length = state_->sequences[index].length;
        out.write_tokens(i, total, num_new[i], length);
        for (size_t g = 0; g < out.tokens.slot_mapping.size(); ++g)
            out.write_slots(g, total, num_new[i], length, groups[g].page_size(), groups[g][index]);
        total += num_new[i];
        if (out.cu_seqlens_q) out.cu_seqlens_q[i + 1] = total;
    }
    if (out.cu_seqlens_q)
        std::fill(out.cu_seqlens_q + count + 1, out.cu_seqlens_q + out.max_batch + 1, total);
    out.clear_last_rows(count, out.num_rows);
    out.clear_tokens(total, out.num_tokens);
    out.num_rows = count;
    out.num_tokens = total;
}

}  // namespace octavo
