// octavo.PageAllocator.
#include <octavo/page_allocator.h>

#include <nanobind/stl/string.h>
#include "bindings/bindings.h"
#include "bindings/scalars.h"
#include "bindings/sequence_arguments.h"
#include "bindings/step_arrays.h"
#include "common/fail.h"

#include <array>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace octavo::bindings {
namespace {

nb::int_ to_python(Sequence sequence) { return nb::int_(static_cast<uint64_t>(sequence)); }

// An int32 array that owns `values`.
template <class T>
nb::object to_numpy(std::vector<T> values, std::initializer_list<size_t> shape) {
    auto owned = std::make_unique<std::vector<T>>(std::move(values));
    nb::capsule owner(owned.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    auto* data = reinterpret_cast<int32_t*>(owned.release()->data());
    return nb::cast(nb::ndarray<nb::numpy, int32_t>(data, shape, owner));
}

nb::tuple page_table(const PageAllocator& allocator, nb::handle seqs) {
    const std::vector<Sequence> sequences = sequences_argument("page_table", seqs);
    const size_t batch = sequences.size();
    const int64_t max_pages = allocator.max_pages(sequences.data(), static_cast<int64_t>(batch));
    std::vector<int32_t> table(batch * static_cast<size_t>(max_pages));
    std::vector<int32_t> seq_lens(batch);
    allocator.write_page_table(sequences.data(), static_cast<int64_t>(batch), table.data(), max_pages,
                               seq_lens.data());
    return nb::make_tuple(to_numpy(std::move(table), {batch, static_cast<size_t>(max_pages)}),
                          to_numpy(std::move(seq_lens), {batch}));
}

nb::object step(PageAllocator& allocator, nb::handle seqs, nb::handle num_new_tokens,
                StepArraysObject& arrays, nb::handle tokens) {
    const std::vector<Sequence> sequences = sequences_argument("step", seqs);
    const auto count = static_cast<int64_t>(sequences.size());
    std::vector<int32_t> same;
    std::optional<Int32Batch> each;
    if (PyLong_Check(num_new_tokens.ptr())) {
        const int64_t n = int_argument("step", "num_new_tokens", num_new_tokens);
        if (n < 0 || n > std::numeric_limits<int32_t>::max()) {
            fail<ValueError>("step", "num_new_tokens (", n, ") must be between 0 and ",
                             std::numeric_limits<int32_t>::max());
        }
        same.assign(sequences.size(), static_cast<int32_t>(n));
    } else {
        each.emplace("step", "num_new_tokens", num_new_tokens);
        if (each->size() != count) {
            fail<ValueError>("step", "num_new_tokens must have one number for each of the ", count,
                             " sequences; got ", each->size());
        }
    }
    const int32_t* const n = each ? each->data() : same.data();
    std::optional<Int32Batch> new_tokens;
    if (!tokens.is_none()) {
        new_tokens.emplace("step", "tokens", tokens);
        const int64_t total = std::accumulate(n, n + count, int64_t{0});
        if (new_tokens->size() != total) {
            fail<ValueError>("step", "tokens must have one token for each of the ", total, " new ones; got ",
                             new_tokens->size());
        }
    }
    allocator.step(sequences.data(), n, count, arrays.arrays(), new_tokens ? new_tokens->data() : nullptr);
    return arrays.num_copies();
}

nb::int_ create(PageAllocator& allocator, nb::handle tokens, nb::handle cache_namespace) {
    if (tokens.is_none()) {
        if (!namespace_argument("create", cache_namespace).empty())
            fail<ValueError>("create", "namespace must come with tokens; an empty list will do");
        return to_python(allocator.create());
    }
    const Int32Batch batch("create", "tokens", tokens);
    return to_python(
        allocator.create(batch.data(), batch.size(), namespace_argument("create", cache_namespace)));
}

nb::int_ key_to_python(const std::array<uint64_t, 2>& key) {
    return nb::int_(nb::int_(key[0]) | (nb::int_(key[1]) << nb::int_(64)));
}

nb::tuple take_events(PageAllocator& allocator) {
    int64_t num_lost = 0;
    nb::list events;
    for (CacheEvent& event : allocator.take_events(&num_lost)) {
        nb::dict dict;
        dict["kind"] = event.kind == CacheEvent::Kind::stored ? "stored" : "evicted";
        dict["page"] = event.page;
        dict["key"] = key_to_python(event.key);
        dict["parent_key"] = key_to_python(event.parent_key);
        const size_t num_tokens = event.tokens.size();
        dict["tokens"] = to_numpy(std::move(event.tokens), {num_tokens});
        events.append(dict);
    }
    return nb::make_tuple(events, num_lost);
}

std::optional<PrefixCacheOptions> prefix_cache_options(nb::handle prefix_cache, nb::handle hash_key,
                                                       nb::handle hash_bits, nb::handle event_capacity) {
    constexpr const char* call = "PageAllocator";
    PrefixCacheOptions options;
    options.hash_bits = int_argument(call, "hash_bits", hash_bits);
    options.event_capacity = int_argument(call, "event_capacity", event_capacity);
    if (!hash_key.is_none()) {
        if (!PyBytes_Check(hash_key.ptr()) || PyBytes_Size(hash_key.ptr()) != 16) {
            fail<ValueError>(call, "hash_key must be 16 bytes");
        }
        std::array<uint64_t, 2> key;
        std::memcpy(key.data(), PyBytes_AsString(hash_key.ptr()), sizeof key);
        options.hash_key = key;
    }
    if (!bool_argument(call, "prefix_cache", prefix_cache)) return std::nullopt;
    return options;
}

nb::dict stats(const PageAllocator& allocator) {
    const PageAllocatorStats stats = allocator.stats();
    nb::dict dict;
    dict["num_pages"] = stats.num_pages;
    dict["page_size"] = stats.page_size;
    dict["num_sequences"] = stats.num_sequences;
    dict["num_used_pages"] = stats.num_used_pages;
    dict["num_shared_pages"] = stats.num_shared_pages;
    dict["num_free_pages"] = stats.num_free_pages;
    dict["num_tokens"] = stats.num_tokens;
    dict["num_stored_tokens"] = stats.num_stored_tokens;
    dict["waste_percent"] = stats.waste_percent;
    return dict;
}

nb::dict cache_stats(const PageAllocator& allocator) {
    const PrefixCacheStats stats = allocator.cache_stats();
    nb::dict dict;
    dict["num_stored_pages"] = stats.num_stored_pages;
    dict["num_idle_pages"] = stats.num_idle_pages;
    dict["num_evicted_pages"] = stats.num_evicted_pages;
    dict["num_queried_tokens"] = stats.num_queried_tokens;
    dict["num_hit_tokens"] = stats.num_hit_tokens;
    return dict;
}

constexpr const char* kClassDoc = R"(The pages of a KV cache: which sequence holds which, and who shares them.

PagedAttention (Kwon et al. 2023, arXiv:2309.06180). The allocator keeps numbers only: the arrays of
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
    prefix_cache: whether pages are found by their tokens. Needs about 90 + 4 * page_size bytes more for each
        page: the tokens are kept to be compared.
    hash_key: 16 bytes that the hash depends on; random by default. Allocators with one key log equal keys for
        equal tokens.
    hash_bits: of the hash, that are used; fewer than 128 serve tests of collisions.
    event_capacity: events kept for take_events(); 0 keeps none.

Raises:
    ValueError: a size out of range.)";

constexpr const char* kCreateDoc =
    R"(Makes a sequence: empty, or of as many of these tokens as the prefix cache has.

length() says how many those are; step() takes the others. Leave out the last token of a prompt, since its
query has still to be computed. Where the last page is found in part only, it is shared and copied when the
sequence grows.

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
    tokens, namespace: as for create().

Returns:
    A handle for unpin(): of a sequence of those pages, to be grown by nobody.

Raises:
    TypeError, ValueError: as create().)";

constexpr const char* kTakeEventsDoc =
    R"(Hands over what has been stored in the prefix cache and evicted since the last call, oldest first.

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
a new one in its place, and take_copies() has one more copy to make. extend(seq, 0) changes nothing.

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
        them, a full page is found by create(tokens) from the next call on; its keys and values have to be in
        the caller's arrays before the next step() or free(). (To drop what was never written, truncate().) If
        the cache has an equal page by then, the sequence takes that one in exchange for its own. A sequence
        that grew without tokens is not stored from there on.

Returns:
    The number of copies written: an int, or a tuple of one for each group where page_table was given as a
    list.

Raises:
    octavo.OutOfPages: too few free pages. `indices` of the error lists the positions in seqs that did not fit
        when every one before them that fits had got its pages: the step succeeds without exactly these.
    octavo.InvalidSequence: one of seqs is no live sequence of this allocator.
    TypeError, ValueError: a bad argument; a table or `copies` with too little room.
    In each case the allocator and the arrays are as before.)";

constexpr const char* kForkDoc = R"(Makes n sequences that share every page of this one.

With `length`, only its first tokens: they share the pages of those. Copies no page and takes none: each of them, and the original, gets a last page of its own when it grows
and others still share it. Costs O(n * pages).

Args:
    seq: handle.
    n: number of new sequences, at least 0.
    length: tokens that they begin with, from 0 to the sequence's length; all by default.

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
    TypeError, ValueError: a bad argument. In each case everything is as before.)";

constexpr const char* kTruncateDoc =
    R"(Drops the tokens of a sequence past the first `length`, and the pages past the last one needed.

Other sequences that share those pages keep them.

Args:
    seq: handle.
    length: tokens to keep, from 0 to the sequence's length.

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

constexpr const char* kPageTableDoc =
    R"(The pages and lengths of several sequences, as paged_attention() takes them.

Args:
    seqs: iterable of handles; one may come several times.

Returns:
    page_table: int32 numpy.ndarray [batch, max_pages], with the most pages of any of them as max_pages.
        Row i holds the pages of seqs[i] in order, then -1.
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
    num_used_pages: held by at least one sequence, or waiting to be copied.
    num_shared_pages: held by two sequences or more.
    num_free_pages: the rest.
    num_tokens: the sum of the sequences' lengths.
    num_stored_tokens: slots that hold a token; one that several sequences share counts once.
    waste_percent: 100 * (slots of used pages without a token) / (slots of used pages), or 0.0.)";

constexpr const char* kCacheStatsDoc = R"(Counts of the prefix cache.

Returns:
    A dict of
    num_stored_pages: that create(tokens) finds.
    num_idle_pages: of these, held by nobody: they count as free, and are found until they are evicted.
    num_evicted_pages: so far.
    num_queried_tokens, num_hit_tokens: asked of create(tokens) so far, and found.

Raises:
    ValueError: the allocator has no prefix cache.)";

}  // namespace

void bind_page_allocator(nb::module_& m) {
    // None passes to our own checks, for their messages.
    const auto seq = nb::arg("seq").none();
    const auto n = nb::arg("n").none();
    nb::class_<PageAllocator>(m, "PageAllocator", kClassDoc)
        .def(
            "__init__",
            [](PageAllocator* self, nb::handle num_pages, nb::handle page_size, nb::handle prefix_cache,
               nb::handle hash_key, nb::handle hash_bits, nb::handle event_capacity) {
                nb::module_::import_("numpy");  // without it take_copies() would lose what it takes
                new (self)
                    PageAllocator(int_argument("PageAllocator", "num_pages", num_pages),
                                  int_argument("PageAllocator", "page_size", page_size),
                                  prefix_cache_options(prefix_cache, hash_key, hash_bits, event_capacity));
            },
            nb::arg("num_pages").none(), nb::arg("page_size").none(), nb::kw_only(),
            nb::arg("prefix_cache").none() = false, nb::arg("hash_key").none() = nb::none(),
            nb::arg("hash_bits").none() = 128, nb::arg("event_capacity").none() = 0,
            nb::sig("def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = False, "
                    "hash_key: bytes | None = None, hash_bits: int = 128, event_capacity: int = 0) -> None"))
        .def("create", &create, nb::arg("tokens").none() = nb::none(), nb::kw_only(),
             nb::arg("namespace").none() = "",
             nb::sig("def create(self, tokens: collections.abc.Iterable[int] | octavo._types.SupportsDLPack "
                     "| None = "
                     "None, *, namespace: str | bytes = '') -> int"),
             kCreateDoc)
        .def(
            "num_cached_tokens",
            [](const PageAllocator& self, nb::handle tokens, nb::handle cache_namespace) {
                const Int32Batch batch("num_cached_tokens", "tokens", tokens);
                return self.num_cached_tokens(batch.data(), batch.size(),
                                              namespace_argument("num_cached_tokens", cache_namespace));
            },
            nb::arg("tokens").none(), nb::kw_only(), nb::arg("namespace").none() = "",
            nb::sig("def num_cached_tokens(self, tokens: collections.abc.Iterable[int] | "
                    "octavo._types.SupportsDLPack, *, namespace: str | bytes = '') -> int"),
            "How many of these tokens create() would find now. Arguments and errors as create().")
        .def(
            "pin",
            [](PageAllocator& self, nb::handle tokens, nb::handle cache_namespace) {
                const Int32Batch batch("pin", "tokens", tokens);
                return to_python(
                    self.pin(batch.data(), batch.size(), namespace_argument("pin", cache_namespace)));
            },
            nb::arg("tokens").none(), nb::kw_only(), nb::arg("namespace").none() = "",
            nb::sig("def pin(self, tokens: collections.abc.Iterable[int] | octavo._types.SupportsDLPack, *, "
                    "namespace: str | bytes = '') -> int"),
            kPinDoc)
        .def(
            "unpin", [](PageAllocator& self, nb::handle pin) { self.unpin(sequence_argument("unpin", pin)); },
            nb::arg("pin").none(), nb::sig("def unpin(self, pin: int) -> None"),
            "Ends a pin(): its pages may be evicted again. Raises octavo.InvalidSequence.")
        .def("take_events", &take_events,
             nb::sig("def take_events(self) -> tuple[list[octavo._types.CacheEvent], int]"), kTakeEventsDoc)
        .def(
            "extend",
            [](PageAllocator& self, nb::handle seq, nb::handle n) {
                self.extend(sequence_argument("extend", seq), int_argument("extend", "n", n));
            },
            seq, n, nb::sig("def extend(self, seq: int, n: int) -> None"), kExtendDoc)
        .def(
            "try_extend",
            [](PageAllocator& self, nb::handle seq, nb::handle n) {
                return self.try_extend(sequence_argument("try_extend", seq),
                                       int_argument("try_extend", "n", n));
            },
            seq, n, nb::sig("def try_extend(self, seq: int, n: int) -> bool"), kTryExtendDoc)
        .def("step", &step, nb::arg("seqs").none(), nb::arg("num_new_tokens").none(), nb::arg("arrays"),
             nb::arg("tokens").none() = nb::none(),
             nb::sig(
                 "def step(self, seqs: collections.abc.Iterable[int], num_new_tokens: int | "
                 "collections.abc.Iterable[int] | octavo._types.SupportsDLPack, arrays: StepArrays, tokens: "
                 "collections.abc.Iterable[int] | octavo._types.SupportsDLPack | None = None) -> "
                 "int | tuple[int, ...]"),
             kStepDoc)
        .def(
            "fork",
            [](PageAllocator& self, nb::handle seq, nb::handle n, nb::handle length) {
                nb::list children;
                for (Sequence child : self.fork(sequence_argument("fork", seq), int_argument("fork", "n", n),
                                                optional_int("fork", "length", length))) {
                    children.append(to_python(child));
                }
                return children;
            },
            seq, nb::arg("n").none() = 1, nb::arg("length").none() = nb::none(),
            nb::sig("def fork(self, seq: int, n: int = 1, length: int | None = None) -> list[int]"), kForkDoc)
        .def(
            "reorder",
            [](PageAllocator& self, nb::handle seqs, nb::handle parents) {
                const std::vector<Sequence> sequences = sequences_argument("reorder", seqs);
                const Int32Batch batch("reorder", "parents", parents);
                if (batch.size() != static_cast<int64_t>(sequences.size())) {
                    fail<ValueError>("reorder", "parents must have one position for each of the ",
                                     sequences.size(), " sequences; got ", batch.size());
                }
                self.reorder(sequences.data(), batch.data(), batch.size());
            },
            nb::arg("seqs").none(), nb::arg("parents").none(),
            nb::sig("def reorder(self, seqs: collections.abc.Iterable[int], parents: "
                    "collections.abc.Iterable[int] | octavo._types.SupportsDLPack) -> None"),
            kReorderDoc)
        .def(
            "truncate",
            [](PageAllocator& self, nb::handle seq, nb::handle length) {
                self.truncate(sequence_argument("truncate", seq), int_argument("truncate", "length", length));
            },
            seq, nb::arg("length").none(), nb::sig("def truncate(self, seq: int, length: int) -> None"),
            kTruncateDoc)
        .def(
            "free", [](PageAllocator& self, nb::handle seq) { self.free(sequence_argument("free", seq)); },
            seq, nb::sig("def free(self, seq: int) -> None"), kFreeDoc)
        .def(
            "length",
            [](const PageAllocator& self, nb::handle seq) {
                return self.length(sequence_argument("length", seq));
            },
            seq, nb::sig("def length(self, seq: int) -> int"),
            "The number of tokens of a sequence. Raises octavo.InvalidSequence.")
        .def(
            "pages",
            [](const PageAllocator& self, nb::handle seq) {
                std::vector<int32_t> pages = self.pages(sequence_argument("pages", seq));
                const size_t num_pages = pages.size();
                return to_numpy(std::move(pages), {num_pages});
            },
            seq, nb::sig("def pages(self, seq: int) -> numpy.typing.NDArray[numpy.int32]"),
            "The pages of a sequence, in order: int32 numpy.ndarray [ceil(length / page_size)]. "
            "Raises octavo.InvalidSequence.")
        .def("page_table", &page_table, nb::arg("seqs").none(),
             nb::sig("def page_table(self, seqs: collections.abc.Iterable[int]) -> "
                     "tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32]]"),
             kPageTableDoc)
        .def(
            "take_copies",
            [](PageAllocator& self) {
                static_assert(sizeof(PageCopy) == 2 * sizeof(int32_t));
                std::vector<PageCopy> copies = self.take_copies();
                const size_t num_copies = copies.size();
                return to_numpy(std::move(copies), {num_copies, 2});
            },
            nb::sig("def take_copies(self) -> numpy.typing.NDArray[numpy.int32]"), kTakeCopiesDoc)
        .def_prop_ro(
            "num_pages", [](const PageAllocator& self) { return self.num_pages(); },
            "Pages to hand out, as given.")
        .def_prop_ro(
            "page_size", [](const PageAllocator& self) { return self.page_size(); },
            "Tokens in a page, as given.")
        .def_prop_ro(
            "num_free_pages", [](const PageAllocator& self) { return self.num_free_pages(); },
            "Pages that extend() can still take.")
        .def("stats", &stats, nb::sig("def stats(self) -> dict[str, int | float]"), kStatsDoc)
        .def("cache_stats", &cache_stats, nb::sig("def cache_stats(self) -> dict[str, int]"), kCacheStatsDoc)
        .def("check_invariants", &PageAllocator::check_invariants,
             "Recounts everything from the sequences; raises RuntimeError naming the first contradiction, "
             "which would be a bug of Octavo.")
        .def("__repr__", [](const PageAllocator& self) {
            return "PageAllocator(num_pages=" + std::to_string(self.num_pages()) +
                   ", page_size=" + std::to_string(self.page_size()) +
                   ", num_free_pages=" + std::to_string(self.num_free_pages()) + ")";
        });
}

}  // namespace octavo::bindings
