// The pages of a KV cache: who holds which, shared how often (PagedAttention, Kwon et al. 2023,
// arXiv:2309.06180). Only numbers: no array is touched.
#pragma once

#include <octavo/error.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace octavo {

// Names a sequence of one allocator. A handle that outlives its sequence is caught at its next use.
enum class Sequence : uint64_t {};

struct PageCopy {
    int32_t from;
    int32_t to;
};

// Layers that share a page table. Layers of another page size or window are another group, with page tables
// of their own over pages of their own.
struct PageGroup {
    int64_t num_pages;
    int64_t page_size;
};

struct PageAllocatorStats {
    int64_t num_pages;
    int64_t page_size;
    int64_t num_sequences;
    int64_t num_used_pages;    // held by at least one sequence, or the source of a copy not yet taken
    int64_t num_shared_pages;  // held by two sequences or more
    int64_t num_free_pages;
    int64_t num_tokens;         // over all sequences
    int64_t num_stored_tokens;  // slots that hold a token; one that several sequences share counts once
    double waste_percent;       // 100 * (used slots without a token) / (used slots); 0 when none is used
};

// Where step() writes one group's share: arrays of the caller's.
struct PageTableArrays {
    int32_t* page_table;  // [max_batch, max_pages]
    int64_t max_pages;
    int64_t row_stride;         // of page_table, in elements
    int32_t* copies = nullptr;  // [max_copies, 2], in C order; null: copies stay pending until take_copies()
    int64_t max_copies = 0;
};

// The arrays that step() writes, and what is in them, so that a step writes only what has changed. They are
// set up here, padding included, and from then on are only read by the caller. Several sets, for steps in
// flight at once, know of their own changes each.
class StepArrays {
  public:
    // seq_lens [max_batch], cu_seqlens_q [max_batch + 1] or null; one table for each group of the allocator.
    StepArrays(int64_t max_batch, const std::vector<PageTableArrays>& tables, int32_t* seq_lens,
               int32_t* cu_seqlens_q = nullptr);
    ~StepArrays();
    StepArrays(StepArrays&&) noexcept;
    StepArrays& operator=(StepArrays&&) noexcept;

    int64_t max_batch() const;
    int64_t num_copies(int64_t group = 0) const;  // that the last step wrote

    void reset();  // sets the arrays up anew, if somebody else has written to them

  private:
    friend class PageAllocator;
    struct State;
    std::unique_ptr<State> state_;
};

// Every call may be made from any thread.
class PageAllocator {
  public:
    PageAllocator(int64_t num_pages, int64_t page_size);  // one group
    explicit PageAllocator(const std::vector<PageGroup>& groups);
    ~PageAllocator();
    PageAllocator(PageAllocator&&) noexcept;
    PageAllocator& operator=(PageAllocator&&) noexcept;

    Sequence create();

    // n more tokens, all or nothing. If the sequence shares a partly filled last page, it gets a copy of
    // its own, to be made by copy_pages from take_copies().
    void extend(Sequence sequence, int64_t n);  // throws OutOfPages
    bool try_extend(Sequence sequence, int64_t n);

    // A step of generation in one call: num_new_tokens[i] more tokens (null: one) for sequences[i], all or
    // nothing, and row i of the arrays shows the sequence as it is then. The rows that are left are padding:
    // page_table -1, seq_lens 0, cu_seqlens_q the total of new tokens. The pending copies go to `copies`.
    // OutOfPages::indices says which sequences did not fit: those that found too few pages when every one
    // before them that fits had got its own. The arrays are then as they were, too.
    void step(const Sequence* sequences, const int32_t* num_new_tokens, int64_t count, StepArrays& arrays);

    // Shares every page; O(pages). Append the sequence's own tokens first: a fork has what its pages hold.
    std::vector<Sequence> fork(Sequence sequence, int64_t n = 1);
    void truncate(Sequence sequence, int64_t length);  // drops tokens at the end
    void free(Sequence sequence);

    int64_t length(Sequence sequence) const;
    std::vector<int32_t> pages(Sequence sequence, int64_t group = 0) const;

    // Pages of the longest of these sequences, and the table [count, max_pages]: row i holds the pages of
    // sequences[i], then -1.
    int64_t max_pages(const Sequence* sequences, int64_t count, int64_t group = 0) const;
    void write_page_table(const Sequence* sequences, int64_t count, int32_t* page_table, int64_t max_pages,
                          int32_t* seq_lens, int64_t group = 0) const;

    // The copies that copy-on-write still has to make, in no particular order: no page is both read and
    // written, none written twice. Make them before the next append_kv. Sources stay reserved until taken.
    std::vector<PageCopy> take_copies(int64_t group = 0);

    int64_t num_groups() const;
    int64_t num_pages(int64_t group = 0) const;
    int64_t page_size(int64_t group = 0) const;
    int64_t num_free_pages(int64_t group = 0) const;
    PageAllocatorStats stats(int64_t group = 0) const;  // O(sequences)

    // Recounts everything from the sequences; throws Error naming the first contradiction.
    void check_invariants() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace octavo
