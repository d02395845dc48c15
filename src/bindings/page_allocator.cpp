// octavo.PageAllocator.
#include <octavo/page_allocator.h>

#include <nanobind/stl/string.h>
#include "bindings/bindings.h"
#include "bindings/scalars.h"
#include "bindings/sequence_arguments.h"
#include "bindings/step_arrays.h"
#include "common/fail.h"

#include <initializer_list>
#include <limits>
#include <memory>
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
                StepArraysObject& arrays) {
    const std::vector<Sequence> sequences = sequences_argument("step", seqs);
    const auto count = static_cast<int64_t>(sequences.size());
    if (PyLong_Check(num_new_tokens.ptr())) {
        const int64_t n = int_argument("step", "num_new_tokens", num_new_tokens);
        if (n < 0 || n > std::numeric_limits<int32_t>::max()) {
            fail<ValueError>("step", "num_new_tokens (", n, ") must be between 0 and ",
                             std::numeric_limits<int32_t>::max());
        }
        const std::vector<int32_t> same(sequences.size(), static_cast<int32_t>(n));
        allocator.step(sequences.data(), same.data(), count, arrays.arrays());
        return arrays.num_copies();
    }
    const Int32Batch each("step", "num_new_tokens", num_new_tokens);
    if (each.size() != count) {
        fail<ValueError>("step", "num_new_tokens must have one number for each of the ", count,
                         " sequences; got ", each.size());
    }
    allocator.step(sequences.data(), each.data(), count, arrays.arrays());
    return arrays.num_copies();
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

constexpr const char* kClassDoc = R"(The pages of a KV cache: which sequence holds which, and who shares them.

PagedAttention (Kwon et al. 2023, arXiv:2309.06180). The allocator keeps numbers only: the arrays of
pages are the caller's, and serve any number of layers under one page table. A page is held by one
sequence or shared by several, and is free again when nobody holds it. A sequence that grows into a
partly filled page that it shares gets a copy of its own first (copy-on-write); take_copies() says
what to copy.

A step of generation: extend() each sequence by its new tokens, copy_pages() what take_copies() returns,
append_kv() the new keys and values, then paged_attention() with page_table(). Fork a sequence after the
append_kv() of its tokens.

A sequence is named by a handle, an int below 2**63. A handle that was freed, or that this allocator never
gave out, raises octavo.InvalidSequence wherever it is used.

Any call may be made from any thread.

Args:
    num_pages: pages to hand out, numbered from 0; 1 to 2**31 - 1. Needs 8 bytes each, once used.
    page_size: tokens in a page; 1 to 2**31 - 1.

Raises:
    ValueError: a size out of range.)";

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

Copies no page and takes none: each of them, and the original, gets a last page of its own when it grows
and others still share it. Costs O(n * pages).

Args:
    seq: handle.
    n: number of new sequences, at least 0.

Returns:
    n handles.

Raises:
    octavo.InvalidSequence: seq is no live sequence of this allocator.
    ValueError: n is negative, or there would be more than 2**28 sequences.)";

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

}  // namespace

void bind_page_allocator(nb::module_& m) {
    // None passes to our own checks, for their messages.
    const auto seq = nb::arg("seq").none();
    const auto n = nb::arg("n").none();
    nb::class_<PageAllocator>(m, "PageAllocator", kClassDoc)
        .def(
            "__init__",
            [](PageAllocator* self, nb::handle num_pages, nb::handle page_size) {
                nb::module_::import_("numpy");  // without it take_copies() would lose what it takes
                new (self) PageAllocator(int_argument("PageAllocator", "num_pages", num_pages),
                                         int_argument("PageAllocator", "page_size", page_size));
            },
            nb::arg("num_pages").none(), nb::arg("page_size").none(),
            nb::sig("def __init__(self, num_pages: int, page_size: int) -> None"))
        .def(
            "create", [](PageAllocator& self) { return to_python(self.create()); },
            "Makes an empty sequence and returns its handle.")
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
             nb::sig("def step(self, seqs: collections.abc.Iterable[int], num_new_tokens: int | "
                     "collections.abc.Iterable[int] | octavo._types.Array, arrays: StepArrays) -> "
                     "int | tuple[int, ...]"),
             kStepDoc)
        .def(
            "fork",
            [](PageAllocator& self, nb::handle seq, nb::handle n) {
                nb::list children;
                for (Sequence child :
                     self.fork(sequence_argument("fork", seq), int_argument("fork", "n", n))) {
                    children.append(to_python(child));
                }
                return children;
            },
            seq, nb::arg("n").none() = 1, nb::sig("def fork(self, seq: int, n: int = 1) -> list[int]"),
            kForkDoc)
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
