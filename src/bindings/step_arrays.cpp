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

int32 arrays in CPU memory, pinned or not, of any library that lends its memory through DLPack. They are set
up here: page_table -1, the others 0. From then on step() writes them and the caller only reads them; a row
whose sequence has the same pages as before is not written again. For steps in flight at once, while pinned
arrays are still being copied to a GPU, say, use several StepArrays in turn.

Args:
    page_table: [max_batch, max_pages], with a unit last stride; or a list of one such array for each group of
        the allocator.
    seq_lens: [max_batch].
    cu_seqlens_q: [max_batch + 1], or None.
    copies: [max_copies, 2] in C order, or a list of one for each group; or None: copies stay pending until
        take_copies(). A step has at most one copy a sequence.

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

// An array of int32 in CPU memory that may be written.
TensorView import(Call& call, const std::string& name, nb::handle array, int ndim, const char* axes) {
    const TensorView view = call.output(name.c_str(), array, Accept::int32);
    if (view.device.type != DeviceType::cpu) {
        fail<DeviceError>(kOp, name, " must be in CPU memory; it is on ", to_string(view.device));
    }
    const Checker check(kOp, view.device);
    check.index(name.c_str(), view, ndim, axes);
    check.writable(name.c_str(), view);
    return view;
}

int32_t* data_of(const TensorView& view) { return static_cast<int32_t*>(view.data); }

}  // namespace

StepArraysObject::StepArraysObject(nb::handle page_table, nb::handle seq_lens, nb::handle cu_seqlens_q,
                                   nb::handle copies)
    : call_(kOp, nb::none()), is_grouped_(is_list(page_table)) {
    std::vector<std::pair<std::string, TensorView>> views;
    auto add = [&](std::string name, nb::handle array, int ndim, const char* axes) {
        const TensorView view = import(call_, name, array, ndim, axes);
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
    const bool has_copies = !copies.is_none();
    const std::vector<nb::object> copy_arrays = has_copies ? items_of(copies) : std::vector<nb::object>{};
    if (has_copies && (is_list(copies) != is_grouped_ || copy_arrays.size() != tables.size())) {
        fail<ValueError>(kOp, "copies must be as page_table, one array or a list of ", tables.size(),
                         "; got ",
                         is_list(copies) ? "a list of " + std::to_string(copy_arrays.size()) : "one array");
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
        if (has_copies) {
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
    }
    num_groups_ = static_cast<int64_t>(groups.size());
    arrays_.emplace(max_batch, groups, data_of(lens), cu_seqlens);
}

nb::object StepArraysObject::num_copies() const {
    if (!is_grouped_) return nb::int_(arrays_->num_copies(0));
    nb::list counts;
    for (int64_t g = 0; g < num_groups_; ++g) counts.append(arrays_->num_copies(g));
    return nb::tuple(counts);
}

void bind_step_arrays(nb::module_& m) {
    nb::class_<StepArraysObject>(m, "StepArrays", kClassDoc)
        .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle>(), nb::arg("page_table").none(),
             nb::arg("seq_lens").none(), nb::arg("cu_seqlens_q").none() = nb::none(),
             nb::arg("copies").none() = nb::none(),
             nb::sig("def __init__(self, page_table: octavo._types.SupportsDLPack | "
                     "collections.abc.Sequence[octavo._types.SupportsDLPack], seq_lens: "
                     "octavo._types.SupportsDLPack, "
                     "cu_seqlens_q: octavo._types.SupportsDLPack | None = None, copies: "
                     "octavo._types.SupportsDLPack | "
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
