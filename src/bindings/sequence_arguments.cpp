#include "bindings/sequence_arguments.h"

#include "bindings/interpreter_lock.h"
#include "bindings/scalars.h"
#include "common/fail.h"

#include <limits>
#include <string>

namespace octavo::bindings {
namespace {

// The value of a plain int, without the calls that any other integer takes.
std::optional<int64_t> small_int(PyObject* value) {
    if (!PyLong_CheckExact(value)) return std::nullopt;
    const long long number = PyLong_AsLongLong(value);
    if (number != -1 || !PyErr_Occurred()) return number;
    PyErr_Clear();
    return std::nullopt;
}

// Calls take(item) with each item of a list, a tuple or any other iterable; `of` says of what.
template <class Take>
void for_each_item(const char* call, const char* name, const char* of, nb::handle values, const Take& take) {
    if (PyList_Check(values.ptr()) || PyTuple_Check(values.ptr())) {
        const bool is_list = PyList_Check(values.ptr());
        const nb::ft_object_guard lock(values);  // other threads may change the list, too
        // The size anew each time: converting an item may run code that changes the list.
        for (Py_ssize_t i = 0; i < PySequence_Size(values.ptr()); ++i) {
            take(nb::borrow(is_list ? PyList_GetItem(values.ptr(), i) : PyTuple_GetItem(values.ptr(), i)));
        }
        return;
    }
    nb::object iterator = nb::steal(call_python(PyObject_GetIter, values.ptr()));
    if (!iterator.is_valid()) {
        PyErr_Clear();
        fail<TypeError>(call, name, " must be an iterable of ", of, "; got ", bindings::type_name(values));
    }
    while (true) {
        nb::object item = nb::steal(call_python(PyIter_Next, iterator.ptr()));
        if (!item.is_valid()) break;
        take(item);
    }
    if (PyErr_Occurred()) throw nb::python_error();
}

}  // namespace

Sequence sequence_argument(const char* call, nb::handle seq) {
    if (const std::optional<int64_t> handle = small_int(seq.ptr())) {
        return static_cast<Sequence>(static_cast<uint64_t>(*handle));
    }
    try {
        return static_cast<Sequence>(static_cast<uint64_t>(int_argument(call, "seq", seq)));
    } catch (const ValueError& error) {  // beyond 64 bits, where no handle is
        throw InvalidSequence(error.what());
    }
}

std::vector<Sequence> sequences_argument(const char* call, nb::handle seqs, const char* name) {
    std::vector<Sequence> sequences;
    for_each_item(call, name, "handles", seqs,
                  [&](nb::handle seq) { sequences.push_back(sequence_argument(call, seq)); });
    return sequences;
}

Int32Batch::Int32Batch(const char* call, const char* name, nb::handle values) {
    using Limits = std::numeric_limits<int32_t>;
    auto append = [&](int64_t number) {
        if (number < Limits::min() || number > Limits::max()) {
            fail<ValueError>(call, name, " must fit in 32 bits; got ", number);
        }
        values_.push_back(static_cast<int32_t>(number));
    };
    if (!PyList_Check(values.ptr()) && !PyTuple_Check(values.ptr())) {
        decltype(array_)::value_type array;
        if (nb::try_cast(values, array, false)) {
            array_ = std::move(array);
            return;
        }
        nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> wide;
        if (nb::try_cast(values, wide, false)) {
            values_.reserve(wide.size());
            for (size_t i = 0; i < wide.size(); ++i) append(wide.data()[i]);
            return;
        }
    }
    for_each_item(call, name, "ints", values, [&](nb::handle value) {
        const std::optional<int64_t> small = small_int(value.ptr());
        append(small ? *small : int_argument(call, name, value));
    });
}

NewTokens::NewTokens(const char* call, nb::handle given, int64_t count) {
    if (PyLong_Check(given.ptr())) {
        const int64_t n = int_argument(call, "num_new_tokens", given);
        if (n < 0 || n > std::numeric_limits<int32_t>::max()) {
            fail<ValueError>(call, "num_new_tokens (", n, ") must be between 0 and ",
                             std::numeric_limits<int32_t>::max());
        }
        same_.assign(static_cast<size_t>(count), static_cast<int32_t>(n));
        return;
    }
    each_.emplace(call, "num_new_tokens", given);
    if (each_->size() != count) {
        fail<ValueError>(call, "num_new_tokens must have one number for each of the ", count,
                         " sequences; got ", each_->size());
    }
}

std::string namespace_argument(const char* call, nb::handle name) {
    nb::object bytes = nb::borrow(name);
    if (PyUnicode_Check(name.ptr())) {
        bytes = nb::steal(PyUnicode_AsEncodedString(name.ptr(), "utf-8", "surrogatepass"));
        if (!bytes.is_valid()) throw nb::python_error();
    }
    if (!PyBytes_Check(bytes.ptr())) {
        fail<TypeError>(call, "namespace must be a str or bytes; got ", bindings::type_name(name));
    }
    return {PyBytes_AsString(bytes.ptr()), static_cast<size_t>(PyBytes_Size(bytes.ptr()))};
}

}  // namespace octavo::bindings
