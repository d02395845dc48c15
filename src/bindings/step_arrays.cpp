#include "bindings/step_arrays.h"

#include "bindings/bindings.h"
#include "checks/check.h"
#include "common/fail.h"

#include <string>
#include <vector>

namespace octavo::bindings {
namespace {

constexpr const char* kOp = "StepArrays";

constexpr const char* kClassDoc = R"(The arrays that PageAllocator.step() writes, kept from step to step.

int32 arrays in CPU memory, pinned or not, of any library that lends its memory through DLPack; positions,
last_rows and slot_mapping may be int64 instead. They are set up here: page_table and slot_mapping -1, the others
0. From then on step() writes them and the caller only reads them; a row
whose sequence has the same pages as before is not written again. For steps in flight at once, while pinned
arrays are still being copied to a GPU, say, use several StepArrays in turn.

Args:
    page_table: [max_batch, max_pages], with a unit last stride; or a list of one such array for each group of
        the allocator.
    seq_lens: [max_batch].
    cu_seqlens_q: [max_batch + 1], or None.
    copies: [max_copies, 2] in C order, or a list of one for each group; or None: copies stay pending until
        take_copies(). A step has at most one copy a sequence.
    positions: [max_tokens], or None: the position of each new token in its sequence, in the order of the packed
        tokens, for a rotary embedding. 0 in the rows past the last new token.
    last_rows: [max_batch], or None: the row of each sequence's last new token among the packed ones, whose logits
        are wanted. 0 for a sequence without new tokens, and for padding.
    slot_mapping: [max_tokens], or a list of one for each group; or None: where each new token goes, its page *
        page_size + its slot in the page, as append_kv() takes it. -1 in the rows past the last new token.

Raises:
    TypeError, ValueError, RuntimeError: an array of another dtype, shape, layout or device, one that cannot
        be written, or two that overlap.)";

bool is_list(nb::handle object) { return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr()); }

std::vector<nb::object> items_of(nb::handle object) {
    std::vector<nb::object> items;
    if (!is_list(object)) {
        items.push_back(nb::borrow(object));
    } else {
        const nb::ft_object_guard lock(object);
        for (nb::handle item : object) items.push_back(nb::borrow(item));
    }
    return items;
}

// An array of int32, or integers, in CPU memory that may be written.
TensorView import(Call& call, const std::string& name, nb::handle array, int ndim, const char* axes,
                  Accept accept) {
    const TensorView view = call.output(name.c_str(), array, accept);
    if (view.device.type != DeviceType::cpu) {
        fail<DeviceError>(kOp, name, " must be in CPU memory; it is on ", to_string(view.device));
    }
    const Checker check(kOp, view.device);
    if (accept == Accept::int32) check.dtype(name.c_str(), view, DType::int32, "");
    check.index(name.c_str(), view, ndim, axes);
    check.writable(name.c_str(), view);
    return view;
}

// Not null where the array is empty, which is not the same as no array.
template <class Integer = int32_t>
Integer* data_of(const TensorView& view) {
    static Integer nothing{};
    return view.size() > 0 ? static_cast<Integer*>(view.data) : &nothing;
}

IntegerArray integers_of(const TensorView& view) {
    if (view.dtype == DType::int32) return data_of(view);
    return data_of<int64_t>(view);
}

}  // namespace

StepArraysObject::StepArraysObject(nb::handle page_table, nb::handle seq_lens, nb::handle cu_seqlens_q,
                                   nb::handle copies, nb::handle positions, nb::handle last_rows,
                                   nb::handle slot_mapping)
    : call_(kOp, nb::none()), is_grouped_(is_list(page_table)) {
    std::vector<std::pair<std::string, TensorView>> views;
    auto add = [&](std::string name, nb::handle array, int ndim, const char* axes,
                   Accept accept = Accept::int32) {
        const TensorView view = import(call_, name, array, ndim, axes, accept);
        arrays_kept_.append(array);
        for (const auto& [other_name, other] : views) {
            Checker(kOp, {}).apart(name.c_str(), view, other_name.c_str(), other);
        }
        views.emplace_back(std::move(name), view);
        return view;
    };
    const TensorView lens = add("seq_lens", seq_lens, 1, "[max_batch]");
    const int64_t max_batch = lens.shape[0];
    int32_t* cu_seqlens = nullptr;
    if (!cu_seqlens_q.is_none()) {
        const TensorView view = add("cu_seqlens_q", cu_seqlens_q, 1, "[max_batch + 1]");
        if (view.shape[0] != max_batch + 1) {
            fail<ValueError>(kOp, "cu_seqlens_q must have shape [", max_batch + 1,
                             "], one more than seq_lens; got ", view.shape_string());
        }
        cu_seqlens = data_of(view);
    }
    const std::vector<nb::object> tables = items_of(page_table);
    auto one_a_group = [&](const char* name, nb::handle given) {
        std::vector<nb::object> arrays;
        if (given.is_none()) return arrays;
        arrays = items_of(given);
        if (is_list(given) != is_grouped_ || arrays.size() != tables.size()) {
            fail<ValueError>(kOp, name, " must be as page_table, one array or a list of ", tables.size(),
                             "; got ",
                             is_list(given) ? "a list of " + std::to_string(arrays.size()) : "one array");
        }
        return arrays;
    };
    const std::vector<nb::object> copy_arrays = one_a_group("copies", copies);
    const std::vector<nb::object> slot_arrays = one_a_group("slot_mapping", slot_mapping);
    TokenArrays tokens;
    const char* first_of_tokens = nullptr;  // the array that says max_tokens
    auto add_tokens = [&](const std::string& name, nb::handle array) {
        const TensorView view = add(name, array, 1, "[max_tokens]", Accept::integer);
        if (!first_of_tokens) tokens.max_tokens = view.shape[0];
        if (view.shape[0] != tokens.max_tokens) {
            fail<ValueError>(kOp, name, " must have max_tokens (", tokens.max_tokens, ") entries, as ",
                             first_of_tokens, "; got ", view.shape_string());
        }
        if (!first_of_tokens) first_of_tokens = positions.is_none() ? "slot_mapping" : "positions";
        return integers_of(view);
    };
    if (!positions.is_none()) tokens.positions = add_tokens("positions", positions);
    if (!last_rows.is_none()) {
        const TensorView view = add("last_rows", last_rows, 1, "[max_batch]", Accept::integer);
        if (view.shape[0] != max_batch) {
            fail<ValueError>(kOp, "last_rows must have max_batch (", max_batch,
                             ") entries, as seq_lens; got ", view.shape_string());
        }
        tokens.last_rows = integers_of(view);
    }
    std::vector<PageTableArrays> groups;
    for (size_t g = 0; g < tables.size(); ++g) {
        const std::string suffix = is_grouped_ ? "[" + std::to_string(g) + "]" : "";
        const TensorView table = add("page_table" + suffix, tables[g], 2, "[max_batch, max_pages]");
        if (table.shape[0] != max_batch) {
            fail<ValueError>(kOp, "page_table", suffix, " must have max_batch (", max_batch,
                             ") rows, as seq_lens; got ", table.shape_string());
        }
        PageTableArrays group{data_of(table), table.shape[1], table.strides[0]};
        if (!copy_arrays.empty()) {
            const TensorView view = add("copies" + suffix, copy_arrays[g], 2, "[max_copies, 2]");
            if (view.shape[1] != 2) {
                fail<ValueError>(kOp, "copies", suffix, " must have shape [max_copies, 2]; got ",
                                 view.shape_string());
            }
            if (view.shape[0] > 1 && view.strides[0] != 2) {
                fail<ValueError>(kOp, "copies", suffix, " must be in C order; its rows are ", view.strides[0],
                                 " elements apart");
            }
            group.copies = data_of(view);
            group.max_copies = view.shape[0];
        }
        groups.push_back(group);
        if (!slot_arrays.empty())
            tokens.slot_mapping.push_back(add_tokens("slot_mapping" + suffix, slot_arrays[g]));
    }
    num_groups_ = static_cast<int64_t>(groups.size());
    arrays_.emplace(max_batch, groups, data_of(lens), cu_seqlens, tokens);
}

nb::object StepArraysObject::num_copies() const {
    if (!is_grouped_) return nb::int_(arrays_->num_copies(0));
    nb::list counts;
    for (int64_t g = 0; g < num_groups_; ++g) counts.append(arrays_->num_copies(g));
    return nb::tuple(counts);
}

void bind_step_arrays(nb::module_& m) {
    nb::class_<StepArraysObject>(m, "StepArrays", kClassDoc)
        .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(),
             nb::arg("page_table").none(), nb::arg("seq_lens").none(),
             nb::arg("cu_seqlens_q").none() = nb::none(), nb::arg("copies").none() = nb::none(),
             nb::kw_only(), nb::arg("positions").none() = nb::none(),
             nb::arg("last_rows").none() = nb::none(), nb::arg("slot_mapping").none() = nb::none(),
             nb::sig("def __init__(self, page_table: octavo._types.SupportsDLPack | "
                     "collections.abc.Sequence[octavo._types.SupportsDLPack], seq_lens: "
                     "octavo._types.SupportsDLPack, "
                     "cu_seqlens_q: octavo._types.SupportsDLPack | None = None, copies: "
                     "octavo._types.SupportsDLPack | "
                     "collections.abc.Sequence[octavo._types.SupportsDLPack] | None = None, *, "
                     "positions: octavo._types.SupportsDLPack | None = None, "
                     "last_rows: octavo._types.SupportsDLPack | None = None, "
                     "slot_mapping: octavo._types.SupportsDLPack | "
                     "collections.abc.Sequence[octavo._types.SupportsDLPack] | None = None) -> None"))
        .def_prop_ro(
            "max_batch", [](StepArraysObject& self) { return self.arrays().max_batch(); },
            "Rows of the arrays: the most sequences in a step.")
        .def_prop_ro(
            "num_copies", &StepArraysObject::num_copies,
            nb::sig("def num_copies(self) -> int | tuple[int, ...]"),
            "Rows of `copies` that the last step wrote: an int, or a tuple of one for each group where "
            "page_table was given as a list.")
        .def(
            "reset", [](StepArraysObject& self) { self.arrays().reset(); }, nb::lock_self(),
            "Sets the arrays up as at first. Needed only after something else has written to them.");
}

}  // namespace octavo::bindings
