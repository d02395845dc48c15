// What a StepArrays remembers of the rows that it holds.
#pragma once

#include <octavo/page_allocator.h>

#include "page_allocator/page_lists.h"

#include <cstdint>
#include <mutex>
#include <vector>

namespace octavo {

struct StepArrays::State {
    // What a row of a page table shows: this list, at this revision, as far as the first num_pages.
    struct Row {
        uint64_t revision = 0;
        int32_t num_pages = 0;
        int32_t sequence = -1;  // index of its entry; -1: the row is empty
    };
    struct Table {
        PageTableArrays arrays;
        std::vector<Row> rows;
        int64_t num_copies = 0;
    };

    State(int64_t max_batch, const std::vector<PageTableArrays>& tables, int32_t* seq_lens,
          int32_t* cu_seqlens_q, const TokenArrays& tokens);

    bool has_token_rows() const { return tokens.positions.has_data() || !tokens.slot_mapping.empty(); }
    void clear() noexcept;
    void write_row(Table& table, int64_t row, int32_t sequence, const PageList& list) noexcept;
    void clear_row(Table& table, int64_t row) noexcept;
    // The new tokens of one row, `num_new` from packed row `begin` on; the sequence has `length` with them.
    void write_tokens(int64_t row, int64_t begin, int32_t num_new, int32_t length) noexcept;
    void write_slots(size_t group, int64_t begin, int32_t num_new, int32_t length, int32_t page_size,
                     const PageList& list) noexcept;
    void clear_tokens(int64_t begin, int64_t end) noexcept;     // packed rows
    void clear_last_rows(int64_t begin, int64_t end) noexcept;  // rows of the batch

    std::mutex mutex;
    int64_t max_batch;
    std::vector<Table> tables;
    int32_t* seq_lens;
    int32_t* cu_seqlens_q;
    TokenArrays tokens;
    int64_t num_rows = 0;    // filled by the last step
    int64_t num_tokens = 0;  // likewise, packed rows
    uint64_t allocator = 0;  // that the rows are of
};

}  // namespace octavo
