// Page numbers, lengths and offsets on the CPU: lists of them, and arrays with gaps between.
#include "bindings/import_array.h"

#include "common/fail.h"

#include <memory>

namespace octavo::bindings {

// A list of ints, or of lists of them, as an array of int64.
nb::object Call::array_of_list(const char* name, nb::handle list) {
    const nb::module_ numpy = nb::module_::import_("numpy");
    nb::object array;
    try {
        array = numpy.attr("asarray")(list);
        if (nb::cast<size_t>(array.attr("size")) == 0) array = array.attr("astype")("int64");
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_ValueError)) throw;
        nb::raise_from(error, PyExc_ValueError,
                       "%s: %s must be an array or a list of ints, rows of one length", op_, name);
    }
    made_.push_back(array);
    return array;
}

// Arrays of int64 in host memory may have any strides: a copy in C order where that of the last axis is
// not 1. An array of no axis, or of more than three, stays as it is: the checks refuse it, and say which axes
// the argument has.
TensorView Call::with_unit_stride(const TensorView& wide) {
    if (wide.ndim < 1 || wide.ndim > 3) return wide;
    const int last = wide.ndim - 1;
    const int64_t columns = wide.shape[last], column_stride = wide.strides[last];
    if (columns < 2 || column_stride == 1) return wide;
    const int64_t rows = last > 0 ? wide.shape[last - 1] : 1, blocks = last > 1 ? wide.shape[0] : 1;
    copied_.push_back(std::make_unique<int64_t[]>(static_cast<size_t>(wide.size())));
    int64_t* to = copied_.back().get();
    for (int64_t row = 0; row < blocks * rows; ++row) {
        const int64_t* from = static_cast<const int64_t*>(wide.data);
        if (last > 0) from += row % rows * wide.strides[last - 1];
        if (last > 1) from += row / rows * wide.strides[0];
        for (int64_t i = 0; i < columns; ++i) *to++ = from[i * column_stride];
    }
    TensorView view = wide;
    view.data = copied_.back().get();
    view.strides[last] = 1;
    if (last > 0) view.strides[last - 1] = columns;
    if (last > 1) view.strides[0] = rows * columns;
    return view;
}

}  // namespace octavo::bindings
