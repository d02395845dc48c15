// The parts of the extension module octavo._core.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo::bindings {

void bind_errors(nanobind::module_& m);
void bind_explain(nanobind::module_& m);
void bind_info(nanobind::module_& m);
void bind_linear_plans(nanobind::module_& m);
void bind_operators(nanobind::module_& m);
void bind_owned_array(nanobind::module_& m);
void bind_page_allocator(nanobind::module_& m);
void bind_step_arrays(nanobind::module_& m);
void bind_xla_operators(nanobind::module_& m);

}  // namespace octavo::bindings
