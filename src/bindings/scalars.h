// Arguments that are not arrays. A failure names operator and argument.
#pragma once

#include <octavo/linear.h>
#include <octavo/tensor.h>

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

namespace octavo::bindings {

namespace nb = nanobind;

std::string type_name(nb::handle object);  // "list", "numpy.ndarray"

// The characters of a str, which live as long as it does; none if it has a lone surrogate, as names of files
// do that are not in UTF-8.
std::optional<std::string_view> utf8_of(nb::handle text);

// str(object), with escapes in place of lone surrogates.
std::string str_of(nb::handle object);

bool bool_argument(const char* op, const char* name, nb::handle value);
int64_t int_argument(const char* op, const char* name, nb::handle value);
// `wanted` is what messages ask for: more than a number where the argument may be something else as well.
double float_argument(const char* op, const char* name, nb::handle value, const char* wanted = "a float");
std::string_view str_argument(const char* op, const char* name, nb::handle value);

// What has that name: any DType, of which the checks say whether it may be given, or an Activation.
template <class T>
T named_argument(const char* op, const char* name, std::string_view value);
template <>
DType named_argument(const char* op, const char* name, std::string_view value);  // "int4"
template <>
Activation named_argument(const char* op, const char* name, std::string_view value);  // "silu"

// Does the same for a type: bool, int64_t, double, float, DType, Activation, or a std::optional of one of
// these, which has no value for None.
template <class T>
T scalar_argument(const char* op, const char* name, nb::handle value) {
    if constexpr (std::is_same_v<T, bool>) {
        return bool_argument(op, name, value);
    } else if constexpr (std::is_same_v<T, int64_t>) {
        return int_argument(op, name, value);
    } else if constexpr (std::is_floating_point_v<T>) {
        return static_cast<T>(float_argument(op, name, value));
    } else if constexpr (std::is_enum_v<T>) {
        return named_argument<T>(op, name, str_argument(op, name, value));
    } else {
        if (value.is_none()) return std::nullopt;
        return scalar_argument<typename T::value_type>(op, name, value);
    }
}

// A cudaStream_t from an int, or from an object with __cuda_stream__ (cuda.core's protocol), cuda_stream
// (torch) or ptr (CuPy). The legacy default stream is null, whichever of its names was given.
std::optional<void*> stream_argument(const char* op, nb::handle stream);

}  // namespace octavo::bindings
