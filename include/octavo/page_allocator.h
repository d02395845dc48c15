// The pages of a KV cache: who holds which, shared how often (PagedAttention, Kwon et al. 2023,
// arXiv:2309.06180). Only numbers: no array is touched.
#pragma once

#include <octavo/error.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
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
    // A query sees this many tokens before its own (-1: all). Pages that no new query can see are returned by
    // themselves, when the sequence grows.
    int64_t window_left = -1;
    int64_t num_host_pages = 0;  // in host memory, for sequences that are preempted
};

// Pages to be copied between the caches of the device and of the host.
struct Transfer {
    int64_t id;
    std::vector<std::vector<PageCopy>> copies;  // one list a group
};

// The pages and lengths of some sequences, all at one moment.
struct PageTable {
    int64_t max_pages;                // of the longest
    std::vector<int32_t> page_table;  // [count, max_pages]
    std::vector<int32_t> seq_lens;    // [count]
};

// How pages are found again by the tokens in them.
struct PrefixCacheOptions {
    // 128 bits that the hash depends on. Random where not given; then nobody can make tokens that collide.
    std::optional<std::array<uint64_t, 2>> hash_key;
    int64_t hash_bits = 128;     // bits of a hash that are used; fewer are slower, and for tests
    int64_t event_capacity = 0;  // events in the log that take_events() reads
};

// A page that became findable, or no longer is.
struct CacheEvent {
    enum class Kind : uint8_t { stored, evicted };

    Kind kind;
    int32_t page;
    std::array<uint64_t, 2> key;         // hash of the page's tokens and all before them
    std::array<uint64_t, 2> parent_key;  // the key of the page before it, or of the namespace
    std::vector<int32_t> tokens;         // [page_size]
};

// What write_page_map says of a page that is not one sequence's own.
enum class PageState : int64_t {
    free = -1,
    cached = -2,    // free, but found by its tokens
    shared = -3,    // two sequences or more have it
    reserved = -4,  // held by nobody, but read or written by a copy or transfer
};

struct PrefixCacheStats {
    int64_t num_stored_pages;    // pages that are found by their tokens
    int64_t num_idle_pages;      // those that nobody holds: free, but found until they are evicted
    int64_t num_evicted_pages;   // so far
    int64_t num_queried_tokens;  // tokens of every create(tokens) so far
    int64_t num_hit_tokens;      // those that were found
};

struct PageAllocatorStats {
    int64_t num_pages;
    int64_t page_size;
    int64_t num_sequences;
    int64_t num_used_pages;    // held by at least one sequence, or read by a copy not yet taken or a transfer
    int64_t num_shared_pages;  // held by two sequences or more
    int64_t num_free_pages;
    int64_t num_tokens;         // over all sequences
    int64_t num_stored_tokens;  // slots that hold a token; one that several sequences share counts once
    double waste_percent;       // 100 * (used slots without a token) / (used slots); 0 when none is used
};

// An array of integers of the caller's, of either kind; or none.
struct IntegerArray {
    int32_t* int32 = nullptr;
    int64_t* int64 = nullptr;

    IntegerArray() = default;
    IntegerArray(std::nullptr_t) {}
    IntegerArray(int32_t* data) : int32(data) {}
    IntegerArray(int64_t* data) : int64(data) {}
    bool has_data() const { return int32 || int64; }
};

// Where step() writes what it knows of each new token, in the order of the packed tokens. Rows past the last
// new token are padding.
struct TokenArrays {
    int64_t max_tokens = 0;
    IntegerArray positions;  // [max_tokens]: in its sequence; 0 for padding
    // [max_batch]: the row of each sequence's last new token; 0 for a sequence without new ones and for
    // padding.
    IntegerArray last_rows;
    // [max_tokens], one for each group or no array at all: page * page_size + slot of the page; -1 for
    // padding.
    std::vector<IntegerArray> slot_mapping;
};

// Where step() writes one group's share: arrays of the caller's.
struct PageTableArrays {
    int32_t* page_table = nullptr;  // [max_batch, max_pages]
    int64_t max_pages = 0;
    // From a row of page_table to the next, in elements; 0: max_pages, as where the rows are contiguous.
    int64_t row_stride = 0;
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
               int32_t* cu_seqlens_q = nullptr, const TokenArrays& tokens = {});
    ~StepArrays();
    StepArrays(StepArrays&&) noexcept;
    StepArrays& operator=(StepArrays&&) noexcept;

    int64_t max_batch() const;
    int64_t num_copies(int64_t group = 0) const;  // copies that the last step wrote

    void reset();  // sets the arrays up anew, if somebody else has written to them

  private:
    friend class PageAllocator;
    struct State;
    std::unique_ptr<State> state_;
};

// Every call may be made from any thread. An array of `count` elements may be null only if count is 0, unless
// it is said here what null means. An object that was moved from, as a StepArrays too, may only be assigned
// to or destroyed.
class PageAllocator {
  public:
    // One group. With a prefix cache, pages are found again by the tokens that step() was told are in them.
    PageAllocator(int64_t num_pages, int64_t page_size,
                  const std::optional<PrefixCacheOptions>& prefix_cache = std::nullopt);
    // With a prefix cache, group 0 must have no window, and all groups one page size. Pages of further groups
    // are found with those of group 0: of a group with a window, the last window's.
    explicit PageAllocator(const std::vector<PageGroup>& groups,
                           const std::optional<PrefixCacheOptions>& prefix_cache = std::nullopt);
    ~PageAllocator();
    PageAllocator(PageAllocator&&) noexcept;
    PageAllocator& operator=(PageAllocator&&) noexcept;

    Sequence create();

    // A sequence of as many of these tokens as the cache has: length() says how many. The last one is always
    // left to be computed, as its query is wanted. Only what was stored under the same namespace is found. A
    // page found in part is shared, and copied when the sequence grows.
    Sequence create(const int32_t* tokens, int64_t count, const std::string& cache_namespace = "");
    // How many of these tokens, from the first one on, the cache has, be it all of them.
    int64_t num_cached_tokens(const int32_t* tokens, int64_t count,
                              const std::string& cache_namespace = "") const;

    // Keeps the full pages of these tokens that the cache has from being evicted until unpin(). The sequence
    // has those pages and cannot grow; its forks can. unpin() throws ValueError for any other sequence.
    Sequence pin(const int32_t* tokens, int64_t count, const std::string& cache_namespace = "");
    void unpin(Sequence pin);

    // Pages stored and evicted since the last call, oldest first; `num_lost` counts those that event_capacity
    // had no room for, the oldest.
    std::vector<CacheEvent> take_events(int64_t* num_lost = nullptr);
    PrefixCacheStats cache_stats() const;

    // n more tokens, all or nothing. If the sequence shares a partly filled last page, it gets a copy of
    // its own, to be made by copy_pages from take_copies().
    void extend(Sequence sequence, int64_t n);  // throws OutOfPages
    bool try_extend(Sequence sequence, int64_t n);

    // The free pages that step() or extend() would take for num_new_tokens[i] more tokens (null: one) of
    // sequences[i], those of copy-on-write included, less those behind windows, which are returned before
    // others are taken; at least 0. A step fits if they are at most num_free_pages() in every group. Pages
    // that the cache has already, and that are returned for that, do not count.
    int64_t needed(const Sequence* sequences, const int32_t* num_new_tokens, int64_t count,
                   int64_t group = 0) const;

    // A step of generation in one call: num_new_tokens[i] more tokens (null: one) for sequences[i], all or
    // nothing, and row i of the arrays shows the sequence as it is then. The rows that are left are padding:
    // page_table -1, seq_lens 0, cu_seqlens_q the total of new tokens. The pending copies go to `copies`.
    // OutOfPages::indices says which sequences did not fit: those that found too few pages when every one
    // before them that fits had got its own. The arrays are then as they were, too.
    //
    // `tokens` are the new tokens, packed, for the prefix cache. A full page whose tokens are all known is
    // stored in the cache at the next call that could find or lose it: step(), extend(), try_extend(),
    // create(tokens), pin() or num_cached_tokens(), or fork(), reorder(), preempt() or free() of its
    // sequence. By then its keys and values are to be in the page, or truncate() has dropped it. If the cache
    // has the same page already, the sequence takes that one and gives its own back.
    void step(const Sequence* sequences, const int32_t* num_new_tokens, int64_t count, StepArrays& arrays,
              const int32_t* tokens = nullptr);

    // Shares the pages of the first `length` tokens, or of all; O(pages). Append the sequence's own tokens
    // first: a fork has what its pages hold.
    std::vector<Sequence> fork(Sequence sequence, int64_t n = 1,
                               std::optional<int64_t> length = std::nullopt);

    // A step of beam search: sequences[i] goes on from what sequences[parents[i]] held before the call.
    // Parents may repeat. Takes no page.
    void reorder(const Sequence* sequences, const int32_t* parents, int64_t count);

    void truncate(Sequence sequence, int64_t length);  // drops tokens at the end
    void free(Sequence sequence);

    // Moves sequences to host memory: copies say (device page, host page). What no other sequence holds
    // moves, once for all of these; the rest stays, shared. Until resumed, they can only be asked their
    // length, or be freed. Throws OutOfPages where the host has too few.
    Transfer preempt(const Sequence* sequences, int64_t count);
    // And back: (host page, device page). Throws OutOfPages where the device has too few. Sequences that
    // share pages still do if they come back in one call. What the prefix cache still has on the device needs
    // no copy.
    Transfer resume(const Sequence* sequences, int64_t count);
    // The pages of a transfer are copied. Before this, no page of it is handed out, whoever lets it go, and
    // its sequences can be used in no call but free() and length().
    void confirm(int64_t transfer);

    int64_t length(Sequence sequence) const;
    // In order; -1 for a page that the window has left behind.
    std::vector<int32_t> pages(Sequence sequence, int64_t group = 0) const;

    // Pages of the longest of these sequences, and the table [count, max_pages]: row i holds the pages of
    // sequences[i], then -1. In place of a page that the window has left behind, it has one still held.
    int64_t max_pages(const Sequence* sequences, int64_t count, int64_t group = 0) const;
    void write_page_table(const Sequence* sequences, int64_t count, int32_t* page_table, int64_t max_pages,
                          int32_t* seq_lens, int64_t group = 0) const;
    // Both in one call, between which no other thread can make a sequence longer.
    PageTable page_table(const Sequence* sequences, int64_t count, int64_t group = 0) const;

    // The tokens in whole pages that all of these sequences begin with, for paged_attention: at least
    // `num_queries` tokens of each lie behind them. Sequences of length 0, padding, do not count behind the
    // first, whose row of the page table names the prefix.
    int64_t shared_prefix_len(const Sequence* sequences, int64_t count, int64_t num_queries = 1,
                              int64_t group = 0) const;

    // The copies that copy-on-write still has to make, in no particular order: no page is both read and
    // written, none written twice. Make them before the next append_kv. Sources stay reserved until taken.
    std::vector<PageCopy> take_copies(int64_t group = 0);

    int64_t num_groups() const;
    int64_t num_pages(int64_t group = 0) const;
    int64_t page_size(int64_t group = 0) const;
    int64_t num_free_pages(int64_t group = 0) const;
    int64_t num_host_pages(int64_t group = 0) const;
    int64_t num_free_host_pages(int64_t group = 0) const;
    PageAllocatorStats stats(int64_t group = 0) const;  // O(sequences)

    // For each page [num_pages], the handle of the only sequence that holds it; otherwise a PageState.
    void write_page_map(int64_t* map, int64_t group = 0) const;

    // Recounts everything from the sequences; throws Error naming the first contradiction.
    void check_invariants() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace octavo
