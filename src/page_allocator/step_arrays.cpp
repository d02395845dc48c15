#include "common/fail.h"
#include "page_allocator/step_rows.h"

#include <algorithm>

namespace octavo {

StepArrays::State::State(int64_t max_batch, const std::vector<PageTableArrays>& tables, int32_t* seq_lens,
                         int32_t* cu_seqlens_q)
    : max_batch(max_batch), seq_lens(seq_lens), cu_seqlens_q(cu_seqlens_q) {
    for (const PageTableArrays& arrays : tables) {
        this->tables.push_back({arrays, std::vector<Row>(static_cast<size_t>(max_batch))});
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
    num_rows = 0;
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
                       int32_t* cu_seqlens_q) {
    if (max_batch < 0) fail<ValueError>("StepArrays", "max_batch (", max_batch, ") must be at least 0");
    for (const PageTableArrays& arrays : tables) {
        if (arrays.max_pages < 0) {
            fail<ValueError>("StepArrays", "max_pages (", arrays.max_pages, ") must be at least 0");
        }
    }
    state_ = std::make_unique<State>(max_batch, tables, seq_lens, cu_seqlens_q);
}

StepArrays::~StepArrays() = default;
StepArrays::StepArrays(StepArrays&&) noexcept = default;
StepArrays& StepArrays::operator=(StepArrays&&) noexcept = default;

int64_t StepArrays::max_batch() const { return state_->max_batch; }

int64_t StepArrays::num_copies(int64_t group) const {
    std::lock_guard lock(state_->mutex);
    if (group < 0 || group >= static_cast<int64_t>(state_->tables.size())) {
        fail<ValueError>("num_copies", "group (", group, ") must be one of the ", state_->tables.size());
    }
    return state_->tables[group].num_copies;
}

void StepArrays::reset() {
    std::lock_guard lock(state_->mutex);
    state_->clear();
}

}  // namespace octavo
