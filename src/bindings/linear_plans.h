// Plans of linear, and the tables that they come from.
#pragma once

#include <octavo/linear.h>

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

namespace octavo::bindings {

// Makes a plan from an octavo.LinearPlan; nothing from None.
std::optional<LinearPlan> plan_argument(const char* op, nanobind::handle plan);

// Reads what octavo.tune_linear() has kept for this GPU of the machine, at the first of these calls; what
// goes wrong is a warning of Python.
void load_tuned_once(int32_t device);
// Does the same for a GPU of this machine by its name, and nothing for other devices.
void load_tuned_of(const std::string& device);

}  // namespace octavo::bindings
