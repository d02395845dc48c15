#include "page_allocator/allocator_state.h"
#include "page_allocator/step_rows.h"

#include <algorithm>
#include <numeric>
#include <type_traits>

namespace octavo {
namespace {

// Calls write(data) with the array's data, if there is any.
template <class Write>
void with_data(const IntegerArray& array, const Write& write) {
    if (array.int32) write(array.int32);
    if (array.int64) write(array.int64);
}

template <class Integer>
void count_from(Integer* to, int64_t count, int64_t first) {
    std::iota(to, to + count, static_cast<Integer>(first));
}

}  // namespace

StepArrays::State::State(int64_t max_batch, const std::vector<PageTableArrays>& tables, int32_t* seq_lens,
                         int32_t* cu_seqlens_q, const TokenArrays& tokens)
    : max_batch(max_batch), seq_lens(seq_lens), cu_seqlens_q(cu_seqlens_q), tokens(tokens) {
    for (const PageTableArrays& arrays : tables) {
        this->tables.push_back({arrays, std::vector<Row>(static_cast<size_t>(max_batch))});
        int64_t& row_stride = this->tables.back().arrays.row_stride;
        if (row_stride == 0) row_stride = arrays.max_pages;
    }
    clear();
}

void StepArrays::State::clear() noexcept {
    for (Table& table : tables) {
        for (int64_t row = 0; row < max_batch; ++row) {
            std::fill_n(table.arrays.page_table + row * table.arrays.row_stride, table.arrays.max_pages, -1);
        }
        std::fill(table.rows.begin(), table.rows.end(), Row{});
        table.num_copies = 0;
    }
    std::fill_n(seq_lens, max_batch, 0);
    if (cu_seqlens_q) std::fill_n(cu_seqlens_q, max_batch + 1, 0);
    clear_last_rows(0, max_batch);
    clear_tokens(0, tokens.max_tokens);
    num_rows = num_tokens = 0;
}

void StepArrays::State::write_tokens(int64_t row, int64_t begin, int32_t num_new, int32_t length) noexcept {
    with_data(tokens.positions, [=](auto* to) { count_from(to + begin, num_new, length - num_new); });
    with_data(tokens.last_rows, [=](auto* to) {
        using Integer = std::remove_pointer_t<decltype(to)>;
        to[row] = num_new > 0 ? static_cast<Integer>(begin + num_new - 1) : 0;
    });
}

void StepArrays::State::write_slots(size_t group, int64_t begin, int32_t num_new, int32_t length,
                                    int32_t page_size, const PageList& list) noexcept {
    with_data(tokens.slot_mapping[group], [&](auto* to) {
        to += begin;
        for (int32_t position = length - num_new; position < length;) {  // a page at a time
            const int32_t slot = position % page_size, count = std::min(page_size - slot, length - position);
            count_from(to, count, int64_t{list.pages[position / page_size]} * page_size + slot);
            to += count;
            position += count;
        }
    });
}

void StepArrays::State::clear_tokens(int64_t begin, int64_t end) noexcept {
    if (begin >= end) return;
    with_data(tokens.positions, [=](auto* to) { std::fill(to + begin, to + end, 0); });
    for (const IntegerArray& slots : tokens.slot_mapping)
        with_data(slots, [=](auto* to) { std::fill(to + begin, to + end, -1); });
}

void StepArrays::State::clear_last_rows(int64_t begin, int64_t end) noexcept {
    if (begin >= end) return;
    with_data(tokens.last_rows, [=](auto* to) { std::fill(to + begin, to + end, 0); });
}

void StepArrays::State::write_row(Table& table, int64_t row, int32_t sequence,
                                  const PageList& list) noexcept {
    Row& shown = table.rows[row];
    const auto num_pages = static_cast<int32_t>(list.pages.size());
    const bool is_same = shown.sequence == sequence && shown.revision == list.revision;
    if (is_same && shown.num_pages == num_pages) return;
    int32_t* const entries = table.arrays.page_table + row * table.arrays.row_stride;
    const int32_t num_kept = is_same ? shown.num_pages : 0;  // a list with its old revision has only grown
    list.write(entries, static_cast<size_t>(num_kept));
    if (num_pages < shown.num_pages) std::fill(entries + num_pages, entries + shown.num_pages, -1);
    shown = {list.revision, num_pages, sequence};
}

void StepArrays::State::clear_row(Table& table, int64_t row) noexcept {
    std::fill_n(table.arrays.page_table + row * table.arrays.row_stride, table.rows[row].num_pages, -1);
    table.rows[row] = {};
}

StepArrays::StepArrays(int64_t max_batch, const std::vector<PageTableArrays>& tables, int32_t* seq_lens,
                       int32_t* cu_seqlens_q, const TokenArrays& tokens) {
    constexpr const char* call = "StepArrays";
    check_not_negative(call, "max_batch", max_batch);
    if (max_batch > SequenceTable::kMaxSequences) {
        fail<ValueError>(call, "max_batch (", max_batch, ") must be at most ", SequenceTable::kMaxSequences);
    }
    if (max_batch > 0 && !seq_lens) fail<ValueError>(call, "seq_lens must not be null");
    for (const PageTableArrays& arrays : tables) {
        const int64_t max_pages = arrays.max_pages, row_stride = arrays.row_stride;
        check_not_negative(call, "max_pages", max_pages);
        if (arrays.copies) check_not_negative(call, "max_copies", arrays.max_copies);
        if (max_batch > 0 && max_pages > 0 && !arrays.page_table)
            fail<ValueError>(call, "page_table must not be null");
        if (max_batch > 1 && row_stride != 0 && -max_pages < row_stride && row_stride < max_pages) {
            fail<ValueError>(call, "row_stride (", row_stride, ") must be at least max_pages (", max_pages,
                             ") in magnitude, so that rows lie apart, or 0 where they are contiguous");
        }
    }
    check_not_negative(call, "max_tokens", tokens.max_tokens);
    if (!tokens.slot_mapping.empty() && tokens.slot_mapping.size() != tables.size()) {
        fail<ValueError>(call, "slot_mapping must have an array for each of the ", tables.size(),
                         " page tables; got ", tokens.slot_mapping.size());
    }
    state_ = std::make_unique<State>(max_batch, tables, seq_lens, cu_seqlens_q, tokens);
}

StepArrays::~StepArrays() = default;
StepArrays::StepArrays(StepArrays&&) noexcept = default;
StepArrays& StepArrays::operator=(StepArrays&&) noexcept = default;

int64_t StepArrays::max_batch() const { return state_->max_batch; }

int64_t StepArrays::num_copies(int64_t group) const {
    std::lock_guard lock(state_->mutex);
    if (group < 0 || group >= static_cast<int64_t>(state_->tables.size())) {
        fail<ValueError>("num_copies", "group (", group, ") must be one of the ", state_->tables.size(),
                         " groups");
    }
    return state_->tables[group].num_copies;
}

void StepArrays::reset() {
    std::lock_guard lock(state_->mutex);
    state_->clear();
}

}  // namespace octavo
