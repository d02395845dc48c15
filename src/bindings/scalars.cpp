#include "bindings/scalars.h"

#include "bindings/derivatives.h"
#include "bindings/interpreter_lock.h"
#include "checks/check.h"

#include <octavo/error.h>

namespace octavo::bindings {
namespace {

// cudaStreamLegacy of the CUDA runtime, which DLPack also uses for the legacy default stream.
constexpr uintptr_t kLegacyStream = 1;

[[noreturn]] void fail_type(const char* op, const char* name, const char* wanted, nb::handle value) {
    throw TypeError(std::string(op) + ": " + name + " must be " + wanted + "; got " +
                    bindings::type_name(value));
}

// Python itself refuses to write very long integers in decimal.
std::string text_of(nb::handle integer) {
    nb::object text = nb::steal(PyObject_Str(integer.ptr()));
    if (!text.is_valid()) {
        PyErr_Clear();
        text = nb::steal(PyNumber_ToBase(integer.ptr(), 16));
    }
    return nb::borrow<nb::str>(text).c_str();
}

// Does what fail_type does, chained to the Python error of a conversion. KeyboardInterrupt and its like pass
// unchanged.
[[noreturn]] void fail_conversion(const char* op, const char* name, const char* wanted, nb::handle value) {
    nb::python_error error;
    if (!error.matches(PyExc_Exception)) throw error;
    if (error.matches(PyExc_OverflowError))
        nb::raise_from(error, PyExc_ValueError, "%s: %s does not fit in %s", op, name, wanted);
    nb::raise_from(error, PyExc_TypeError, "%s: %s must be %s; got %s", op, name, wanted,
                   bindings::type_name(value).c_str());
}

}  // namespace

std::optional<std::string_view> utf8_of(nb::handle text) {
    Py_ssize_t size = 0;
    const char* const bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (bytes) return std::string_view(bytes, static_cast<size_t>(size));
    PyErr_Clear();
    return std::nullopt;
}

std::string str_of(nb::handle object) {
    const nb::str text(object);
    if (const std::optional<std::string_view> utf8 = utf8_of(text)) return std::string(*utf8);
    const nb::object escaped = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
    if (!escaped.is_valid()) throw nb::python_error();
    return PyBytes_AsString(escaped.ptr());
}

std::string type_name(nb::handle object) {
    const nb::handle type = object.type();
    const std::string module = str_of(type.attr("__module__"));
    const std::string name = str_of(type.attr("__qualname__"));
    return module == "builtins" ? name : module + "." + name;
}

bool bool_argument(const char* op, const char* name, nb::handle value) {
    if (value.ptr() == Py_True) return true;
    if (value.ptr() == Py_False) return false;
    const std::string type = bindings::type_name(value);
    if (type != "numpy.bool" && type != "numpy.bool_") fail_type(op, name, "a bool", value);
    return PyObject_IsTrue(value.ptr()) == 1;
}

int64_t int_argument(const char* op, const char* name, nb::handle value) {
    if (!PyIndex_Check(value.ptr())) fail_type(op, name, "an int", value);
    nb::object index = nb::steal(call_python(PyNumber_Index, value.ptr()));
    if (!index.is_valid()) fail_conversion(op, name, "an int", value);
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow)
        throw ValueError(std::string(op) + ": " + name + " must fit in 64 bits with a sign; got " +
                         text_of(index));
    return number;
}

double float_argument(const char* op, const char* name, nb::handle value, const char* wanted) {
    if (!PyFloat_Check(value.ptr()) && !PyIndex_Check(value.ptr()) && !nb::hasattr(value, "__float__")) {
        fail_type(op, name, wanted, value);
    }
    if (!PyFloat_Check(value.ptr()) && !PyLong_Check(value.ptr()))
        refuse_derivatives_of_number(op, name, value);
    const double number = call_python(PyFloat_AsDouble, value.ptr());
    if (number == -1.0 && PyErr_Occurred()) fail_conversion(op, name, wanted, value);
    return number;
}

std::string_view str_argument(const char* op, const char* name, nb::handle value) {
    if (!PyUnicode_Check(value.ptr())) fail_type(op, name, "a str", value);
    const std::optional<std::string_view> text = utf8_of(value);
    if (text && text->find('\0') == std::string_view::npos) return *text;
    const nb::object shown = nb::steal(PyObject_ASCII(value.ptr()));
    if (!shown.is_valid()) throw nb::python_error();
    throw ValueError(std::string(op) + ": " + name +
                     " must be text without null characters and lone surrogates; got " + str_of(shown));
}

template <>
DType named_argument(const char* op, const char* name, std::string_view value) {
    for (DType dtype : kDTypes) {
        if (value == to_string(dtype)) return dtype;
    }
    if (value == to_string(DType::int4)) return DType::int4;
    fail<ValueError>(op, name, " must be ", kDtypesInBytes, "; got ", value);
}

template <>
Activation named_argument(const char* op, const char* name, std::string_view value) {
    for (Activation activation : {Activation::silu, Activation::gelu, Activation::silu_gate}) {
        if (value == to_string(activation)) return activation;
    }
    fail<ValueError>(op, name, " must be silu, gelu, silu_gate or None; got ", value);
}

std::optional<void*> stream_argument(const char* op, nb::handle stream) {
    if (stream.is_none()) return std::nullopt;
    nb::object address = nb::borrow(stream);
    if (!PyLong_Check(stream.ptr())) {
        if (nb::hasattr(stream, "__cuda_stream__")) {
            nb::object pair = stream.attr("__cuda_stream__");
            if (PyCallable_Check(pair.ptr())) pair = pair();
            if (!nb::isinstance<nb::tuple>(pair) || nb::len(pair) != 2) {
                throw TypeError(std::string(op) +
                                ": stream's __cuda_stream__ must give (version, address); got " +
                                nb::repr(pair).c_str());
            }
            address = pair[1];
        } else if (nb::hasattr(stream, "cuda_stream")) {
            address = stream.attr("cuda_stream");
        } else if (nb::hasattr(stream, "ptr")) {
            address = stream.attr("ptr");
        } else {
            fail_type(op, "stream", "an int, or an object with __cuda_stream__, cuda_stream or ptr", stream);
        }
    }
    if (!PyLong_Check(address.ptr())) fail_type(op, "stream's address", "an int", address);
    const unsigned long long value = PyLong_AsUnsignedLongLong(address.ptr());
    if (PyErr_Occurred()) {
        PyErr_Clear();
        throw ValueError(std::string(op) + ": stream must be an address of 0 to 64 bits; got " +
                         text_of(address));
    }
    return reinterpret_cast<void*>(value == kLegacyStream ? 0 : static_cast<uintptr_t>(value));
}

}  // namespace octavo::bindings
