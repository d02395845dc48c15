// torch's derivatives, which calls of an operator do not have: a tensor that would lose its own is refused.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo::bindings {

namespace nb = nanobind;

// Refuses a tensor that requires grad, unless gradients are off.
void refuse_gradient(const char* op, const char* name, nb::handle tensor);

// Whether forward-mode differentiation is under way, in this thread as in all of them.
bool has_tangents();
void refuse_tangent(const char* op, const char* name, nb::handle tensor);

// Does both for what was given in place of a number, where it is a tensor of torch.
void refuse_derivatives_of_number(const char* op, const char* name, nb::handle value);

}  // namespace octavo::bindings
