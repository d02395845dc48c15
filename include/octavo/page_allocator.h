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

class PageAllocator {
  public:
    PageAllocator(int64_t num_pages, int64_t page_size);
    ~PageAllocator();
    PageAllocator(PageAllocator&&) noexcept;
    PageAllocator& operator=(PageAllocator&&) noexcept;

    Sequence create();

    // n more tokens, all or nothing. If the sequence shares a partly filled last page, it gets a copy of
    // its own, to be made by copy_pages from take_copies().
    void extend(Sequence sequence, int64_t n);  // throws OutOfPages
    bool try_extend(Sequence sequence, int64_t n);

    // Shares every page; O(pages). Append the sequence's own tokens first: a fork has what its pages hold.
    std::vector<Sequence> fork(Sequence sequence, int64_t n = 1);
    void truncate(Sequence sequence, int64_t length);  // drops tokens at the end
    void free(Sequence sequence);

    int64_t length(Sequence sequence) const;
    std::vector<int32_t> pages(Sequence sequence) const;

    // Pages of the longest of these sequences, and the table [count, max_pages]: row i holds the pages of
    // sequences[i], then -1.
    int64_t max_pages(const Sequence* sequences, int64_t count) const;
    void write_page_table(const Sequence* sequences, int64_t count, int32_t* page_table, int64_t max_pages,
                          int32_t* seq_lens) const;

    // The copies that copy-on-write still has to make, in no particular order: no page is both read and
    // written, none written twice. Make them before the next append_kv. Sources stay reserved until taken.
    std::vector<PageCopy> take_copies();

    int64_t num_pages() const;
    int64_t page_size() const;
    int64_t num_free_pages() const;
    PageAllocatorStats stats() const;

    // Recounts everything from the sequences; throws Error naming the first contradiction.
    void check_invariants() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace octavo
