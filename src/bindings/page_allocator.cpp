// octavo.PageAllocator.
#include <octavo/page_allocator.h>

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include "bindings/bindings.h"
#include "bindings/page_allocator_docs.h"
#include "bindings/pages_in_memory.h"
#include "bindings/scalars.h"
#include "bindings/sequence_arguments.h"
#include "bindings/step_arrays.h"
#include "common/fail.h"

#include <array>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace octavo::bindings {
namespace {

nb::int_ to_python(Sequence sequence) { return nb::int_(static_cast<uint64_t>(sequence)); }

// An array that owns `values`: of integers, or of structs of int32.
template <class T>
nb::object to_numpy(std::vector<T> values, std::initializer_list<size_t> shape) {
    using Element = std::conditional_t<std::is_integral_v<T>, T, int32_t>;
    auto owned = std::make_unique<std::vector<T>>(std::move(values));
    nb::capsule owner(owned.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    auto* data = reinterpret_cast<Element*>(owned.release()->data());
    return nb::cast(nb::ndarray<nb::numpy, Element>(data, shape, owner));
}

nb::tuple page_table(const PageAllocator& allocator, nb::handle seqs, nb::handle group) {
    const std::vector<Sequence> sequences = sequences_argument("page_table", seqs);
    const int64_t g = int_argument("page_table", "group", group);
    const size_t batch = sequences.size();
    PageTable table = allocator.page_table(sequences.data(), static_cast<int64_t>(batch), g);
    const auto max_pages = static_cast<size_t>(table.max_pages);
    return nb::make_tuple(to_numpy(std::move(table.page_table), {batch, max_pages}),
                          to_numpy(std::move(table.seq_lens), {batch}));
}

nb::object step(PageAllocator& allocator, nb::handle seqs, nb::handle num_new_tokens, nb::handle given_arrays,
                nb::handle tokens) {
    if (!nb::isinstance<StepArraysObject>(given_arrays)) {
        fail<TypeError>("step", "arrays must be an octavo.StepArrays; got ",
                        bindings::type_name(given_arrays));
    }
    auto& arrays = nb::cast<StepArraysObject&>(given_arrays);
    const std::vector<Sequence> sequences = sequences_argument("step", seqs);
    const auto count = static_cast<int64_t>(sequences.size());
    const NewTokens num_new("step", num_new_tokens, count);
    const int32_t* const n = num_new.data();
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

int64_t needed(const PageAllocator& allocator, nb::handle seqs, nb::handle num_new_tokens, nb::handle group) {
    const std::vector<Sequence> sequences = sequences_argument("needed", seqs);
    const auto count = static_cast<int64_t>(sequences.size());
    const NewTokens n("needed", num_new_tokens, count);
    return allocator.needed(sequences.data(), n.data(), count, int_argument("needed", "group", group));
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

constexpr const char* kAllocator = "PageAllocator";

PageGroup page_group(const char* call, nb::handle num_pages, nb::handle page_size, nb::handle window_left,
                     nb::handle num_host_pages) {
    PageGroup group;
    group.num_pages = int_argument(call, "num_pages", num_pages);
    group.page_size = int_argument(call, "page_size", page_size);
    group.window_left = int_argument(call, "window_left", window_left);
    group.num_host_pages = int_argument(call, "num_host_pages", num_host_pages);
    return group;
}

// What is equal if the groups are, and what makes an equal one.
nb::tuple fields_of(const PageGroup& group) {
    return nb::make_tuple(group.num_pages, group.page_size, group.window_left, group.num_host_pages);
}

std::vector<PageGroup> page_groups(nb::handle given) {
    constexpr const char* call = "from_groups";
    constexpr const char* wanted = "groups must be a list of octavo.PageGroup; got ";
    if (PyUnicode_Check(given.ptr()) || PyBytes_Check(given.ptr()) || !PySequence_Check(given.ptr()))
        fail<TypeError>(call, wanted, bindings::type_name(given));
    std::vector<PageGroup> groups;
    for (nb::handle group : nb::tuple(given)) {
        PageGroup* each = nullptr;
        if (!nb::try_cast(group, each, false) || !each) {
            fail<TypeError>(call, wanted, bindings::type_name(given), " with groups[", groups.size(),
                            "] of type ", bindings::type_name(group));
        }
        groups.push_back(*each);
    }
    return groups;
}

std::optional<PrefixCacheOptions> prefix_cache_options(nb::handle prefix_cache, nb::handle hash_key,
                                                       nb::handle hash_bits, nb::handle event_capacity) {
    constexpr const char* call = kAllocator;
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
    if (bool_argument(call, "prefix_cache", prefix_cache)) return options;
    const PrefixCacheOptions none;
    const char* const without_use = options.hash_key                                ? "hash_key"
                                    : options.hash_bits != none.hash_bits           ? "hash_bits"
                                    : options.event_capacity != none.event_capacity ? "event_capacity"
                                                                                    : nullptr;
    if (without_use) fail<ValueError>(call, without_use, " needs prefix_cache=True");
    return std::nullopt;
}

nb::dict stats(const PageAllocator& allocator, nb::handle group) {
    const PageAllocatorStats stats = allocator.stats(int_argument("stats", "group", group));
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

template <class T>
nb::object copies_to_numpy(std::vector<T> copies) {
    static_assert(sizeof(T) == 2 * sizeof(int32_t));
    const size_t num_copies = copies.size();
    return to_numpy(std::move(copies), {num_copies, 2});
}

// (id, copies), with a list of copies where there are several groups.
nb::tuple to_python(Transfer transfer) {
    nb::list copies;
    for (std::vector<PageCopy>& of_group : transfer.copies)
        copies.append(copies_to_numpy(std::move(of_group)));
    return nb::make_tuple(transfer.id, nb::len(copies) == 1 ? nb::object(copies[0]) : nb::object(copies));
}

nb::object page_map(const PageAllocator& allocator, nb::handle group) {
    const int64_t g = int_argument("page_map", "group", group);
    std::vector<int64_t> map(static_cast<size_t>(allocator.num_pages(g)));
    allocator.write_page_map(map.data(), g);
    const size_t num_pages = map.size();
    return to_numpy(std::move(map), {num_pages});
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

}  // namespace

void bind_page_allocator(nb::module_& m) {
    // None passes to our own checks, for their messages.
    const auto seq = nb::arg("seq").none();
    const auto n = nb::arg("n").none();
    const auto group = nb::arg("group").none() = 0;
    nb::class_<PageGroup>(m, "PageGroup", kPageGroupDoc)
        .def(
            "__init__",
            [](PageGroup* self, nb::handle num_pages, nb::handle page_size, nb::handle window_left,
               nb::handle num_host_pages) {
                new (self)
                    PageGroup(page_group("PageGroup", num_pages, page_size, window_left, num_host_pages));
            },
            nb::arg("num_pages").none(), nb::arg("page_size").none(), nb::kw_only(),
            nb::arg("window_left").none() = -1, nb::arg("num_host_pages").none() = 0,
            nb::sig("def __init__(self, num_pages: int, page_size: int, *, window_left: int = -1, "
                    "num_host_pages: int = 0) -> None"))
        .def_ro("num_pages", &PageGroup::num_pages)
        .def_ro("page_size", &PageGroup::page_size)
        .def_ro("window_left", &PageGroup::window_left)
        .def_ro("num_host_pages", &PageGroup::num_host_pages)
        .def("__repr__",
             [](const PageGroup& self) {
                 return "PageGroup(num_pages=" + std::to_string(self.num_pages) +
                        ", page_size=" + std::to_string(self.page_size) +
                        ", window_left=" + std::to_string(self.window_left) +
                        ", num_host_pages=" + std::to_string(self.num_host_pages) + ")";
             })
        .def(
            "__eq__",
            [](const PageGroup& self, nb::handle other) -> nb::object {
                if (!nb::isinstance<PageGroup>(other)) return nb::borrow(Py_NotImplemented);
                return nb::bool_(fields_of(self).equal(fields_of(nb::cast<const PageGroup&>(other))));
            },
            nb::arg("other").none(), nb::sig("def __eq__(self, other: object, /) -> bool"))
        .def("__hash__", [](const PageGroup& self) { return nb::hash(fields_of(self)); })
        // For copy and pickle.
        .def("__getstate__", &fields_of, nb::sig("def __getstate__(self) -> tuple[int, int, int, int]"))
        .def(
            "__setstate__",
            [](PageGroup& self, const std::tuple<int64_t, int64_t, int64_t, int64_t>& fields) {
                const auto [num_pages, page_size, window_left, num_host_pages] = fields;
                new (&self) PageGroup{num_pages, page_size, window_left, num_host_pages};
            },
            nb::arg("fields"), nb::sig("def __setstate__(self, fields: tuple[int, int, int, int]) -> None"));
    nb::class_<PageAllocator>(m, "PageAllocator", kClassDoc)
        .def(
            "__init__",
            [](PageAllocator* self, nb::handle num_pages, nb::handle page_size, nb::handle window_left,
               nb::handle num_host_pages, nb::handle prefix_cache, nb::handle hash_key, nb::handle hash_bits,
               nb::handle event_capacity) {
                nb::module_::import_("numpy");  // without it take_copies() would lose what it takes
                new (self)
                    PageAllocator({page_group(kAllocator, num_pages, page_size, window_left, num_host_pages)},
                                  prefix_cache_options(prefix_cache, hash_key, hash_bits, event_capacity));
            },
            nb::arg("num_pages").none(), nb::arg("page_size").none(), nb::kw_only(),
            nb::arg("window_left").none() = -1, nb::arg("num_host_pages").none() = 0,
            nb::arg("prefix_cache").none() = false, nb::arg("hash_key").none() = nb::none(),
            nb::arg("hash_bits").none() = 128, nb::arg("event_capacity").none() = 0,
            nb::sig("def __init__(self, num_pages: int, page_size: int, *, window_left: int = -1, "
                    "num_host_pages: int = 0, prefix_cache: bool = False, hash_key: bytes | None = None, "
                    "hash_bits: int = 128, event_capacity: int = 0) -> None"))
        .def_static(
            "from_memory",
            [](nb::handle num_bytes, nb::handle page_size, nb::handle num_layers, nb::handle num_kv_heads,
               nb::handle head_dim, nb::handle dtype, nb::handle token_scales, nb::handle window_left,
               nb::handle num_host_pages, nb::handle prefix_cache, nb::handle hash_key, nb::handle hash_bits,
               nb::handle event_capacity, nb::handle head_dim_v) {
                nb::module_::import_("numpy");
                const nb::int_ num_pages(pages_in_memory(num_bytes, page_size, num_layers, num_kv_heads,
                                                         head_dim, head_dim_v, dtype, token_scales));
                return PageAllocator(
                    {page_group(kAllocator, num_pages, page_size, window_left, num_host_pages)},
                    prefix_cache_options(prefix_cache, hash_key, hash_bits, event_capacity));
            },
            nb::arg("num_bytes").none(), nb::kw_only(), nb::arg("page_size").none(),
            nb::arg("num_layers").none(), nb::arg("num_kv_heads").none(), nb::arg("head_dim").none(),
            nb::arg("dtype").none(), nb::arg("token_scales").none() = true,
            nb::arg("window_left").none() = -1, nb::arg("num_host_pages").none() = 0,
            nb::arg("prefix_cache").none() = false, nb::arg("hash_key").none() = nb::none(),
            nb::arg("hash_bits").none() = 128, nb::arg("event_capacity").none() = 0,
            nb::arg("head_dim_v").none() = nb::none(),
            nb::sig("def from_memory(num_bytes: int, *, page_size: int, num_layers: int, num_kv_heads: int, "
                    "head_dim: int, dtype: typing.Any, token_scales: bool = True, window_left: int = -1, "
                    "num_host_pages: int = 0, prefix_cache: bool = False, hash_key: bytes | None = None, "
                    "hash_bits: int = 128, event_capacity: int = 0, head_dim_v: int | None = None) -> "
                    "PageAllocator"),
            kFromMemoryDoc)
        .def_static(
            "from_groups",
            [](nb::handle groups, nb::handle prefix_cache, nb::handle hash_key, nb::handle hash_bits,
               nb::handle event_capacity) {
                nb::module_::import_("numpy");
                return PageAllocator(page_groups(groups),
                                     prefix_cache_options(prefix_cache, hash_key, hash_bits, event_capacity));
            },
            nb::arg("groups").none(), nb::kw_only(), nb::arg("prefix_cache").none() = false,
            nb::arg("hash_key").none() = nb::none(), nb::arg("hash_bits").none() = 128,
            nb::arg("event_capacity").none() = 0,
            nb::sig("def from_groups(groups: collections.abc.Sequence[PageGroup], *, prefix_cache: bool = "
                    "False, hash_key: bytes | None = None, hash_bits: int = 128, event_capacity: int = 0) -> "
                    "PageAllocator"),
            kFromGroupsDoc)
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
            "How many of these tokens, from the first one on, the cache has now, be it all of them. "
            "Arguments and "
            "errors as create().")
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
            "Ends a pin(): its pages may be evicted again. Raises octavo.InvalidSequence; ValueError for a "
            "sequence that is not a pin.")
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
        .def("step", &step, nb::arg("seqs").none(), nb::arg("num_new_tokens").none(),
             nb::arg("arrays").none().lock(), nb::arg("tokens").none() = nb::none(),
             nb::sig(
                 "def step(self, seqs: collections.abc.Iterable[int], num_new_tokens: int | "
                 "collections.abc.Iterable[int] | octavo._types.SupportsDLPack, arrays: StepArrays, tokens: "
                 "collections.abc.Iterable[int] | octavo._types.SupportsDLPack | None = None) -> "
                 "int | tuple[int, ...]"),
             kStepDoc)
        .def("needed", &needed, nb::arg("seqs").none(), nb::arg("num_new_tokens").none() = 1, group,
             nb::sig(
                 "def needed(self, seqs: collections.abc.Iterable[int], num_new_tokens: int | "
                 "collections.abc.Iterable[int] | octavo._types.SupportsDLPack = 1, group: int = 0) -> int"),
             kNeededDoc)
        .def(
            "fork",
            [](PageAllocator& self, nb::handle seq, nb::handle n, nb::handle length) {
                nb::list children;
                for (Sequence child :
                     self.fork(sequence_argument("fork", seq), int_argument("fork", "n", n),
                               scalar_argument<std::optional<int64_t>>("fork", "length", length))) {
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
            "preempt",
            [](PageAllocator& self, nb::handle seqs) {
                const std::vector<Sequence> sequences = sequences_argument("preempt", seqs);
                return to_python(self.preempt(sequences.data(), static_cast<int64_t>(sequences.size())));
            },
            nb::arg("seqs").none(),
            nb::sig("def preempt(self, seqs: collections.abc.Iterable[int]) -> tuple[int, "
                    "numpy.typing.NDArray[numpy.int32] | list[numpy.typing.NDArray[numpy.int32]]]"),
            kPreemptDoc)
        .def(
            "resume",
            [](PageAllocator& self, nb::handle seqs) {
                const std::vector<Sequence> sequences = sequences_argument("resume", seqs);
                return to_python(self.resume(sequences.data(), static_cast<int64_t>(sequences.size())));
            },
            nb::arg("seqs").none(),
            nb::sig("def resume(self, seqs: collections.abc.Iterable[int]) -> tuple[int, "
                    "numpy.typing.NDArray[numpy.int32] | list[numpy.typing.NDArray[numpy.int32]]]"),
            kResumeDoc)
        .def(
            "confirm",
            [](PageAllocator& self, nb::handle transfer) {
                self.confirm(int_argument("confirm", "transfer", transfer));
            },
            nb::arg("transfer").none(), nb::sig("def confirm(self, transfer: int) -> None"),
            "Says that the pages of a preempt() or resume() are copied; once each. Raises ValueError where "
            "it is "
            "not in flight.")
        .def(
            "length",
            [](const PageAllocator& self, nb::handle seq) {
                return self.length(sequence_argument("length", seq));
            },
            seq, nb::sig("def length(self, seq: int) -> int"),
            "The number of tokens of a sequence. Raises octavo.InvalidSequence.")
        .def(
            "pages",
            [](const PageAllocator& self, nb::handle seq, nb::handle group) {
                std::vector<int32_t> pages =
                    self.pages(sequence_argument("pages", seq), int_argument("pages", "group", group));
                const size_t num_pages = pages.size();
                return to_numpy(std::move(pages), {num_pages});
            },
            seq, group,
            nb::sig("def pages(self, seq: int, group: int = 0) -> numpy.typing.NDArray[numpy.int32]"),
            "The pages of a sequence, in order: int32 numpy.ndarray [ceil(length / page_size)]; -1 for one "
            "that "
            "the group's window has left behind. Raises octavo.InvalidSequence.")
        .def("page_table", &page_table, nb::arg("seqs").none(), group,
             nb::sig("def page_table(self, seqs: collections.abc.Iterable[int], group: int = 0) -> "
                     "tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32]]"),
             kPageTableDoc)
        .def(
            "shared_prefix_len",
            [](const PageAllocator& self, nb::handle seqs, nb::handle num_queries, nb::handle group) {
                const std::vector<Sequence> sequences = sequences_argument("shared_prefix_len", seqs);
                return self.shared_prefix_len(sequences.data(), static_cast<int64_t>(sequences.size()),
                                              int_argument("shared_prefix_len", "num_queries", num_queries),
                                              int_argument("shared_prefix_len", "group", group));
            },
            nb::arg("seqs").none(), nb::arg("num_queries").none() = 1, group,
            nb::sig("def shared_prefix_len(self, seqs: collections.abc.Iterable[int], num_queries: int = 1, "
                    "group: int = 0) -> int"),
            kSharedPrefixLenDoc)
        .def(
            "take_copies",
            [](PageAllocator& self, nb::handle group) {
                return copies_to_numpy(self.take_copies(int_argument("take_copies", "group", group)));
            },
            group, nb::sig("def take_copies(self, group: int = 0) -> numpy.typing.NDArray[numpy.int32]"),
            kTakeCopiesDoc)
        .def_prop_ro(
            "num_pages", [](const PageAllocator& self) { return self.num_pages(); },
            "Pages to hand out, as given.")
        .def_prop_ro(
            "page_size", [](const PageAllocator& self) { return self.page_size(); },
            "Tokens in a page, as given.")
        .def_prop_ro(
            "num_free_pages", [](const PageAllocator& self) { return self.num_free_pages(); },
            "Pages that extend() can still take.")
        .def_prop_ro("num_groups", &PageAllocator::num_groups,
                     "Groups of layers; 1 unless made by from_groups().")
        .def_prop_ro(
            "num_host_pages", [](const PageAllocator& self) { return self.num_host_pages(); },
            "Pages in host memory, as given.")
        .def_prop_ro(
            "num_free_host_pages", [](const PageAllocator& self) { return self.num_free_host_pages(); },
            "Pages that preempt() can still take.")
        .def("stats", &stats, group, nb::sig("def stats(self, group: int = 0) -> dict[str, int | float]"),
             kStatsDoc)
        .def("page_map", &page_map, group,
             nb::sig("def page_map(self, group: int = 0) -> numpy.typing.NDArray[numpy.int64]"), kPageMapDoc)
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
