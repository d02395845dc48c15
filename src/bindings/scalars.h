// Arguments that are not arrays. A failure names operator and argument; None gives nothing.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

namespace octavo::bindings {

namespace nb = nanobind;

std::string type_name(nb::handle object);  // "list", "numpy.ndarray"

bool bool_argument(const char* op, const char* name, nb::handle value);
int64_t int_argument(const char* op, const char* name, nb::handle value);
double float_argument(const char* op, const char* name, nb::handle value);
std::optional<int64_t> optional_int(const char* op, const char* name, nb::handle value);
std::optional<double> optional_float(const char* op, const char* name, nb::handle value);

// A cudaStream_t from an int, or from an object with __cuda_stream__ (cuda.core's protocol), cuda_stream
// (torch) or ptr (CuPy). The legacy default stream is null, whichever of its names was given.
std::optional<void*> stream_argument(const char* op, nb::handle stream);

}  // namespace octavo::bindings
