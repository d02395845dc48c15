// The docstrings of octavo.PageAllocator.
#pragma once

namespace octavo::bindings {

constexpr const char* kClassDoc = R"(The pages of a KV cache: which sequence holds which, and who shares them.

This is PagedAttention's (Kwon et al. 2023, arXiv:2309.06180). The allocator keeps numbers only: the arrays of
pages are the caller's, and serve any number of layers under one page table. A page is held by one
sequence or shared by several, and is free again when nobody holds it. A sequence that grows into a
partly filled page that it shares gets a copy of its own first (copy-on-write); take_copies() says
what to copy.

A step of generation: extend() each sequence by its new tokens, copy_pages() what take_copies() returns,
append_kv() the new keys and values, then paged_attention() with page_table(). Fork a sequence after the
append_kv() of its tokens.

With prefix_cache, pages are found again by the tokens in them: create(tokens) makes a sequence that shares
what is there, and step(tokens=...) says what is in new pages. A freed page is found until it is needed for
something else; pages go least recently used first, the deepest of a prompt before those above it. A keyed
hash finds candidates, and the tokens themselves are compared before one is believed.

A sequence is named by a handle, an int below 2**63. A handle that was freed, or that this allocator never
gave out, raises octavo.InvalidSequence wherever it is used.

Any call may be made from any thread.

Args:
    num_pages: pages to hand out, numbered from 0; 1 to 2**31 - 1. Needs 8 bytes each, once used.
    page_size: tokens in a page; 1 to 2**31 - 1.
    window_left: how many tokens before its own a query sees, as of paged_attention(); -1: all. Pages that no new
        query can see are returned by themselves as the sequence grows.
    num_host_pages: pages in host memory, for preempt().
    prefix_cache: whether pages are found by their tokens. Needs about 60 + 4 * page_size bytes more for each
        page: the tokens are kept to be compared.
    hash_key: 16 bytes that the hash depends on; random by default. Allocators with one key log equal keys for
        equal tokens.
    hash_bits: how many bits of the hash are used; fewer than 128 serve tests of collisions.
    event_capacity: how many events are kept for take_events(); 0 keeps none.

Raises:
    ValueError: a size out of range.)";

constexpr const char* kCreateDoc =
    R"(Makes a sequence: empty, or of as many of these tokens as the prefix cache has.

length() says how many those are, at most all but the last one, whose query has to be computed in any case;
step() takes the others. Where the last page is found in part only, it is shared and copied when the sequence
grows.

Args:
    tokens: ints of 32 bits: a list, or an int32 array in CPU memory.
    namespace: str or bytes. Tokens are found only where step() stored them under the same one: keep tenants,
        adapters or models apart with it.

Returns:
    The handle.

Raises:
    TypeError, ValueError: tokens or namespace of another kind; tokens without a prefix cache.)";

constexpr const char* kPinDoc = R"(Keeps the full pages of these tokens that the cache has from being evicted.

Args:
    tokens: as for create().
    namespace: as for create().

Returns:
    A handle for unpin(): that of a sequence with those pages, which cannot grow; its forks can.

Raises:
    TypeError, ValueError: as create().)";

constexpr const char* kTakeEventsDoc =
    R"(Hands over what has been stored in the prefix cache and evicted since the last call, oldest first.

Stores nothing itself, so that it may be called while a step is computed: the pages that the last step filled
are among the events once another step has begun (of no sequences, if need be), or a call that could find or
lose them has come.

Returns:
    events: a list of dicts of
        kind: "stored" or "evicted".
        page: int.
        key: int of 128 bits, the hash of the page's tokens and all before them in their namespace.
        parent_key: the key of the page before it, or of the namespace.
        tokens: int32 numpy.ndarray [page_size].
    num_lost: how many older ones event_capacity had no room for.

Raises:
    ValueError: the allocator has no prefix cache.)";

constexpr const char* kExtendDoc = R"(Makes room for n more tokens at the end of a sequence, all or nothing.

Takes a page whenever the last one is full. If the last page is partly filled and shared, the sequence gets
a new one in its place, and take_copies() has one more copy to make. extend(seq, 0) takes no page; like any
other n, it returns those that a window has left behind.

Args:
    seq: handle.
    n: number of tokens, at least 0; a sequence holds up to 2**31 - 1.

Raises:
    octavo.OutOfPages: too few free pages; everything is as before.
    octavo.InvalidSequence: seq is no live sequence of this allocator.
    ValueError: n is negative, or the sequence would grow too long.)";

constexpr const char* kTryExtendDoc = R"(As extend(), but returns False where that raises octavo.OutOfPages.

Args:
    seq: handle.
    n: number of tokens, at least 0.

Returns:
    True if the sequence has grown; False, with everything as before, if there are too few free pages.

Raises:
    octavo.InvalidSequence, ValueError: as extend().)";

constexpr const char* kStepDoc =
    R"(A step of generation in one call: extends a batch and writes what the kernels read.

Each sequence gets room for its new tokens, as by extend(), all of them or none. Then row i of the arrays
shows seqs[i]: its pages, its length with the new tokens, and where its new tokens lie among those of the
batch. The rows left over are padding: page_table -1, seq_lens 0, cu_seqlens_q the number of new tokens in
all; so a CUDA graph over max_batch rows can be replayed with fewer sequences. The pending copies of
copy-on-write go to `copies`, where there is one: pass its first rows, as many as returned, to copy_pages().

Args:
    seqs: handles, at most max_batch; a list or tuple of ints is fastest. None may come twice.
    num_new_tokens: an int for all of them, or one for each, at least 0: a list, or an int32 array.
    arrays: StepArrays.
    tokens: the new tokens of all sequences, one after the other: an int32 array, or any iterable of ints. With
        them, a full page is found by create(tokens). Its keys and values have to be in the caller's arrays
        before the next call that stores it: step(), extend(), try_extend(), create(tokens), pin() or
        num_cached_tokens(), or fork(), reorder(), preempt() or free() of its sequence. (To drop what was never
        written, truncate().) If the cache has an equal page by then, the sequence takes that one in exchange
        for its own. A sequence that grew without tokens is not stored from there on.

Returns:
    The number of copies written: an int, or a tuple of one for each group where page_table was given as a
    list.

Raises:
    octavo.OutOfPages: too few free pages. `indices` of the error lists the positions in seqs that did not fit
        when every one before them that fits had got its pages: the step succeeds without exactly these.
    octavo.InvalidSequence: one of seqs is no live sequence of this allocator.
    TypeError, ValueError: a bad argument; a table or `copies` with too little room.

In each case the allocator and the arrays are as before.)";

constexpr const char* kNeededDoc =
    R"(The free pages that a step would take, those of copy-on-write included.

step() and extend() succeed if this is at most num_free_pages, and raise octavo.OutOfPages otherwise; where there are
several groups, it has to hold for each of them (stats(group)["num_free_pages"]). Pages that a window has left behind
are subtracted, since they are returned before others are taken; the result is at least 0. Pages that the prefix cache
turns out to have already do not count.

Args:
    seqs: handles; none may come twice.
    num_new_tokens: as for step(). Default: 1.
    group: of layers.

Returns:
    The number of pages.

Raises:
    octavo.InvalidSequence, TypeError, ValueError: as step().)";

constexpr const char* kForkDoc = R"(Makes n sequences that share every page of this one.

With `length` they begin with its first tokens alone, and share the pages of those. No page is copied or taken: each
of them, and the original, gets a last page of its own when it grows while others still share that page. Costs
O(n * pages).

Args:
    seq: handle.
    n: number of new sequences, at least 0.
    length: tokens that they begin with, from 0 to the sequence's length, as for truncate(); all by default.

Returns:
    n handles.

Raises:
    octavo.InvalidSequence: seq is no live sequence of this allocator.
    ValueError: n is negative, length is out of range, or there would be more than 2**28 sequences.)";

constexpr const char* kReorderDoc =
    R"(A step of beam search: each sequence goes on from what another one held before the call.

Takes no page and copies none; pages are copied when beams that share them grow.

Args:
    seqs: handles; none may come twice.
    parents: for each of them, the position in seqs of the one that it goes on from. Positions may repeat.

Raises:
    octavo.InvalidSequence: one of seqs is no live sequence of this allocator.
    TypeError, ValueError: a bad argument.

In each case everything is as before.)";

constexpr const char* kTruncateDoc =
    R"(Drops the tokens of a sequence past the first `length`, and the pages past the last one needed.

Other sequences that share those pages keep them.

Args:
    seq: handle.
    length: tokens to keep, from 0 to the sequence's length. Where a window has returned pages, 0 or as many
        tokens as it takes for the next query to see none of those.

Raises:
    octavo.InvalidSequence: seq is no live sequence of this allocator.
    ValueError: length is out of range.)";

constexpr const char* kFreeDoc =
    R"(Ends a sequence. Its handle is invalid from now on; pages that nobody else holds are free.

A copy still to be made into such a page is dropped.

Args:
    seq: handle.

Raises:
    octavo.InvalidSequence: seq is no live sequence of this allocator (a double free, say).)";

constexpr const char* kPreemptDoc = R"(Moves sequences to host memory.

What no other sequence holds moves, once for all of these; the rest stays, shared. Copy the pages, then
confirm(). Before that no page of either side is handed out, whoever lets it go. Until they are resumed, the
sequences can only be freed, or asked their length.

Args:
    seqs: handles; none may come twice.

Returns:
    transfer: int, for confirm().
    copies: int32 numpy.ndarray [n, 2]: (device page, host page); a list of one for each group where there are
        several.

Raises:
    octavo.OutOfPages: too few free host pages.
    octavo.InvalidSequence: one of seqs is no live sequence of this allocator.
    ValueError: one that is preempted already, or a pin; copies of copy-on-write that were not taken.

In each case everything is as before.)";

constexpr const char* kResumeDoc = R"(Brings preempted sequences back.

Copy the pages, then confirm(): the sequences can be used from then on. Sequences that share pages still do if
they come back in one call. A page that the prefix cache still has on the device needs no copy.

Args:
    seqs: handles; none may come twice.

Returns:
    transfer: int, for confirm().
    copies: int32 numpy.ndarray [n, 2]: (host page, device page); a list of one for each group where there are
        several.

Raises:
    octavo.OutOfPages: too few free pages.
    octavo.InvalidSequence: one of seqs is no live sequence of this allocator.
    ValueError: one that is not preempted, or whose transfer to the host is not confirmed.

In each case everything is as before.)";

constexpr const char* kFromMemoryDoc =
    R"(Makes an allocator of as many pages as some memory holds.

The memory is for caches as octavo.empty_cache makes them, one for each layer. The allocator's num_pages is what to
make them with.

Args:
    num_bytes: bytes of memory, for all layers together.
    page_size: as for PageAllocator.
    num_layers: layers, each with a cache of its own.
    num_kv_heads: as for octavo.empty_cache.
    head_dim: as for octavo.empty_cache.
    dtype: as for octavo.empty_cache.
    token_scales: as for octavo.empty_cache.
    window_left: as for PageAllocator.
    num_host_pages: as for PageAllocator; not of this memory.
    prefix_cache: as for PageAllocator.
    hash_key: as for PageAllocator.
    hash_bits: as for PageAllocator.
    event_capacity: as for PageAllocator.
    head_dim_v: as for octavo.empty_cache.

Raises:
    TypeError, ValueError: an argument of another kind or out of range, or too few bytes for one page.)";

constexpr const char* kPageGroupDoc = R"(Layers that share a page table, for PageAllocator.from_groups().

Args:
    num_pages: as for PageAllocator, of the cache of these layers alone.
    page_size: as for PageAllocator.
    window_left: as for PageAllocator.
    num_host_pages: as for PageAllocator.)";

constexpr const char* kFromGroupsDoc =
    R"(Makes an allocator for a model whose layers differ in page size or window.

Each group of layers has pages, caches and page tables of its own; a sequence grows in all of them or in none.
StepArrays take a list of tables, other calls the number of a group.

With a prefix cache, create(tokens) finds the longest prefix that group 0 has, less as many pages from its end as it
takes until every group still has what its layers see: a group with a window needs the pages of the last window
alone. Group 0 must have no window, and all groups must have
one page size. Events and cache_stats() speak of group 0.

Args:
    groups: a list of octavo.PageGroup.
    prefix_cache: as for PageAllocator. Needs 16 bytes more for each page of a further group.
    hash_key: as for PageAllocator.
    hash_bits: as for PageAllocator.
    event_capacity: as for PageAllocator.

Raises:
    TypeError, ValueError: groups of another kind, empty, with a size out of range, or that cannot have a prefix
        cache.)";

constexpr const char* kPageMapDoc = R"(Who holds each page; O(pages).

Args:
    group: of layers.

Returns:
    int64 numpy.ndarray [num_pages]: the handle of the only sequence that holds the page; or -1: free; -2: free,
    but found by its tokens; -3: shared by several; -4: held by nobody, but read or written by a copy or
    transfer under way.)";

constexpr const char* kSharedPrefixLenDoc =
    R"(The tokens in whole pages that several sequences all begin with, as paged_attention() takes them.

Args:
    seqs: iterable of handles; one may come several times. Sequences of length 0, padding, do not count; but
        the row of the first names the prefix, so that there is none if the first is padding.
    num_queries: the most queries of any of them in the call. That many tokens of each lie behind the prefix.
    group: of layers; those with a window cannot read a prefix once.

Returns:
    The tokens, a multiple of page_size; 0 if there are none, or no sequences.

Raises:
    octavo.InvalidSequence: one of seqs is no live sequence of this allocator.
    ValueError: num_queries is negative, or there is no such group.)";

constexpr const char* kPageTableDoc =
    R"(The pages and lengths of several sequences, as paged_attention() takes them.

Args:
    seqs: iterable of handles; one may come several times.
    group: of layers.

Returns:
    page_table: int32 numpy.ndarray [batch, max_pages], with the most pages of any of them as max_pages.
        Row i holds the pages of seqs[i] in order, then -1. In place of a page that the window has left behind,
        it has one still held.
    seq_lens: int32 numpy.ndarray [batch], in tokens.

Raises:
    octavo.InvalidSequence: one of seqs is no live sequence of this allocator.
    TypeError: seqs is not iterable, or holds something else than ints.)";

constexpr const char* kTakeCopiesDoc =
    R"(Hands over the copies that copy-on-write still has to make, for copy_pages().

Make them before the next append_kv(). They are in no particular order: no page is both read and written, and
none is written twice. Until they are taken, the pages to be read are not handed out again, even when no
sequence holds them any more.

Returns:
    int32 numpy.ndarray [n, 2]: the pages (from, to). The next call returns later ones only.)";

constexpr const char* kStatsDoc = R"(Counts of pages and tokens. Costs O(sequences).

Returns:
    A dict of
    num_pages, page_size: as given.
    num_sequences: live sequences.
    num_used_pages: pages held by at least one sequence, or waiting to be copied or transferred.
    num_shared_pages: pages held by two sequences or more.
    num_free_pages: all other pages.
    num_tokens: the sum of the sequences' lengths.
    num_stored_tokens: slots that hold a token; one that several sequences share counts once.
    waste_percent: 100 * (slots of used pages without a token) / (slots of used pages), or 0.0.)";

constexpr const char* kCacheStatsDoc = R"(Counts of the prefix cache.

Returns:
    A dict of
    num_stored_pages: pages that create(tokens) finds, without those that the last step filled and may still compute.
    num_idle_pages: those of them that nobody holds: they count as free, and are found until they are evicted.
    num_evicted_pages: pages evicted so far.
    num_queried_tokens, num_hit_tokens: tokens that create(tokens) was asked for so far, and those that it found.

Raises:
    ValueError: the allocator has no prefix cache.)";

}  // namespace octavo::bindings
