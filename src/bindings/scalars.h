// Arguments that are not arrays. A failure names operator and argument.
#pragma once

#include <octavo/tensor.h>

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

namespace octavo::bindings {

namespace nb = nanobind;

std::string type_name(nb::handle object);  // "list", "numpy.ndarray"

bool bool_argument(const char* op, const char* name, nb::handle value);
int64_t int_argument(const char* op, const char* name, nb::handle value);
double float_argument(const char* op, const char* name, nb::handle value);
DType dtype_argument(const char* op, const char* name, nb::handle value);  // "int4"

// The dtype of that name. Which of them it may be is for the checks to say.
DType dtype_argument(const char* op, const char* name, const std::string& value);

// The same by type: bool, int64_t, double, float, DType, or a std::optional of one, which has no value for
// None.
template <class T>
T scalar_argument(const char* op, const char* name, nb::handle value) {
    if constexpr (std::is_same_v<T, bool>) {
        return bool_argument(op, name, value);
    } else if constexpr (std::is_same_v<T, int64_t>) {
        return int_argument(op, name, value);
    } else if constexpr (std::is_floating_point_v<T>) {
        return static_cast<T>(float_argument(op, name, value));
    } else if constexpr (std::is_same_v<T, DType>) {
        return dtype_argument(op, name, value);
    } else {
        if (value.is_none()) return std::nullopt;
        return scalar_argument<typename T::value_type>(op, name, value);
    }
}

// A cudaStream_t from an int, or from an object with __cuda_stream__ (cuda.core's protocol), cuda_stream
// (torch) or ptr (CuPy). The legacy default stream is null, whichever of its names was given.
std::optional<void*> stream_argument(const char* op, nb::handle stream);

}  // namespace octavo::bindings
