#include "bindings/derivatives.h"

#include "bindings/array_type.h"
#include "common/fail.h"

#include <string_view>

namespace octavo::bindings {
namespace {

bool wants_gradient(nb::handle tensor) {
    static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
    return nb::cast<bool>(tensor.attr(nb::handle(requires_grad))) &&
           nb::cast<bool>(nb::module_::import_("torch").attr("is_grad_enabled")());
}

}  // namespace

void refuse_gradient(const char* op, const char* name, nb::handle tensor) {
    if (!wants_gradient(tensor)) return;
    const char* differentiable =
        op == std::string_view("attention") ? "octavo.torch.attention without out, " : "";
    fail<TypeError>(op, name, " requires grad, and this call has no backward; use ", differentiable, name,
                    ".detach() or torch.no_grad()");
}

bool has_tangents() {
    static PyObject* const module = nb::module_::import_("torch.autograd.forward_ad").release().ptr();
    static PyObject* const level = PyUnicode_InternFromString("_current_level");
    return nb::cast<int>(nb::handle(module).attr(nb::handle(level))) >= 0;
}

void refuse_tangent(const char* op, const char* name, nb::handle tensor) {
    const nb::object dual = nb::module_::import_("torch.autograd.forward_ad").attr("unpack_dual")(tensor);
    if (dual.attr("tangent").is_none()) return;
    fail<TypeError>(op, name, " has a tangent (forward-mode differentiation), and this call has no jvp; use ",
                    name, ".detach()");
}

void refuse_derivatives_of_number(const char* op, const char* name, nb::handle value) {
    if (array_type_of(value).framework != Framework::torch) return;
    if (wants_gradient(value)) {
        fail<TypeError>(op, name, " requires grad, and this call has no backward for numbers; use ", name,
                        ".detach() or torch.no_grad()");
    }
    if (has_tangents()) refuse_tangent(op, name, value);
}

}  // namespace octavo::bindings
