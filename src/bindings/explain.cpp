// Which kernel a call would run, for Python: the arguments as operators take them, but that an array may be a
// shape and a dtype alone.
#include <octavo/explain.h>

#include "bindings/bindings.h"
#include "bindings/import_array.h"
#include "bindings/linear_plans.h"
#include "bindings/results.h"
#include "bindings/scalars.h"
#include "common/fail.h"
#include "operators/schema.h"

#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

namespace octavo::bindings {
namespace {

using schema::Access;

// Whether the array lends memory on a device that Octavo knows. A tensor of torch's device meta does not, nor
// does a jax.ShapeDtypeStruct.
bool lends_memory(nb::handle array) {
    if (!nb::hasattr(array, "__dlpack_device__")) return false;
    try {
        array.attr("__dlpack_device__")();
        return true;
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_Exception)) throw;
        return false;
    }
}

// "bfloat16", for dtypes of NumPy, JAX and torch.
std::string dtype_name(nb::handle dtype) {
    const std::string name = str_of(dtype), prefix = "torch.";
    return name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name;
}

// The words that octavo.pack_tree_mask would make of bools.
TensorView view_of_words(const char* op, const char* name, nb::handle bools) {
    nb::module_::import_("octavo._tree_mask").attr("check_bools")(op, name, bools);
    TensorView view;
    view.dtype = DType::int64;
    view.device = {DeviceType::meta, 0};
    view.ndim = 1;
    view.shape[0] = int_argument(op, name, bools.attr("shape")[0]);
    set_c_order(view);
    return view;
}

// The layout that shape and dtype say, and a torch tensor's strides: on the device meta, at no address.
TensorView view_of_shape(const char* op, const char* name, nb::handle array, schema::Accept accept) {
    if (!nb::hasattr(array, "shape") || !nb::hasattr(array, "dtype")) {
        fail<TypeError>(op, name, " must be an array, or have a shape and a dtype; got ",
                        bindings::type_name(array));
    }
    const std::string wanted = dtype_name(array.attr("dtype"));
    if (accept == schema::Accept::words && wanted == "bool") return view_of_words(op, name, array);
    const std::optional<DType> dtype = dtype_named(wanted, accept);
    if (!dtype || !may_be(*dtype, accept)) refuse_dtype(op, name, accept, wanted);
    TensorView view;
    view.dtype = *dtype;
    view.device = {DeviceType::meta, 0};
    const nb::tuple shape(array.attr("shape"));
    if (shape.size() > TensorView::kMaxDims) {
        fail<ValueError>(op, name, " must have at most ", TensorView::kMaxDims, " axes; got ", shape.size());
    }
    view.ndim = static_cast<int32_t>(shape.size());
    for (int axis = 0; axis < view.ndim; ++axis) view.shape[axis] = int_argument(op, name, shape[axis]);
    set_c_order(view);
    const nb::object strides = nb::getattr(array, "stride", nb::none());
    if (nb::isinstance<nb::callable>(strides)) {
        const nb::tuple own(strides());
        for (int axis = 0; axis < view.ndim; ++axis) view.strides[axis] = int_argument(op, name, own[axis]);
    }
    return view;
}

// The arguments of one call.
template <class Operator>
class Arguments {
  public:
    typename Operator::Args args;

    explicit Arguments(nb::dict given) : given_(given), call_(Operator::kName, nb::none()) {
        schema::for_each_argument<Operator>([&](const auto& argument) {
            if (!argument.is_result()) take(argument);
        });
        schema::for_each_argument<Operator>([&](const auto& argument) {
            if (argument.is_result()) add_result(argument);
        });
        if constexpr (std::is_same_v<Operator, schema::Linear>) {
            if (is_given("plan")) args.plan = plan_argument(Operator::kName, given_["plan"]);
        }
    }

    // The device of the arrays that lend memory: "cuda:0", "cpu". It is empty if all are on the CPU, so that
    // their values count, or if there are none.
    std::string device() const {
        if (device_ && device_->type == DeviceType::cuda) return to_string(*device_);
        return device_ && has_shapes_alone_ ? "cpu" : "";
    }

  private:
    bool is_given(const char* name) const { return given_.contains(name) && !given_[name].is_none(); }

    template <class Argument>
    void take(const Argument& argument) {
        const bool is_given = this->is_given(argument.name);
        if constexpr (Argument::kIsArray) {
            if (!is_given && !Argument::kIsRequired) return;
            const nb::object array = is_given ? nb::object(given_[argument.name]) : nb::none();
            args.*argument.member = import(argument, argument.name, array);
        } else if (is_given) {
            const nb::object given = given_[argument.name];
            if (take_in_place(argument.name, given)) return;
            using Value = typename Argument::Value;
            args.*argument.member = scalar_argument<Value>(Operator::kName, argument.name, given);
        }
    }

    // Whether an array, or a shape and a dtype, was given where a number may stand. It goes to the argument
    // that takes the number's place.
    bool take_in_place(const char* number, nb::handle given) {
        bool taken = false;
        if (!is_array(given) && (nb::hasattr(given, "__float__") || !nb::hasattr(given, "shape")))
            return taken;
        schema::for_each_argument<Operator>([&](const auto& argument) {
            if constexpr (std::decay_t<decltype(argument)>::kIsArray) {
                if (!argument.in_place_of || std::string_view(argument.in_place_of) != number) return;
                args.*argument.member = import(argument, number, given);
                taken = true;
            }
        });
        return taken;
    }

    // A new result is as the operator makes it. No check reads a result, so that any addresses apart from
    // each other will do.
    template <class Argument>
    void add_result(const Argument& argument) {
        if constexpr (Argument::kIsArray) {
            const char* const asked_by = argument.asked_by;
            if (asked_by &&
                !(given_.contains(asked_by) && bool_argument(Operator::kName, asked_by, given_[asked_by])))
                return;
            if (is_given(argument.name)) {
                args.*argument.member = import(argument, argument.name, given_[argument.name]);
                return;
            }
            if (!asked_by && !bindings::is_given(args.*argument.like)) return;
            TensorView view = shape_of_result(argument, args);
            view.data = reinterpret_cast<void*>((2 + num_results_++) << 56);
            args.*argument.member = view;
        }
    }

    template <class Argument>
    TensorView import(const Argument& argument, const char* name, nb::handle array) {
        TensorView view;
        const bool is_list = PyList_Check(array.ptr()) || PyTuple_Check(array.ptr());
        if (is_list && argument.accept == schema::Accept::integer && argument.access != Access::write) {
            view = call_.input(name, array, argument.accept);
        } else if (!lends_memory(array)) {
            view = view_of_shape(Operator::kName, name, array, argument.accept);
            has_shapes_alone_ = true;
        } else {
            // A cache that is copied, or copied to, may lie in host memory beside one on a GPU.
            constexpr bool kCopies = std::is_same_v<Operator, schema::CopyPages>;
            view = kCopies && argument.access == Access::write
                       ? call_.input_or_host(name, array, argument.accept)
                       : call_.input(name, array, argument.accept);
            if (!device_ || view.device.type == DeviceType::cuda) device_ = view.device;
        }
        view.read_only = false;  // octavo.jax replaces the arrays that an operator writes
        return view;
    }

    const nb::dict given_;
    Call call_;
    std::optional<Device> device_;
    bool has_shapes_alone_ = false;
    uintptr_t num_results_ = 0;
};

nb::object to_python(const PlanValue& value) {
    return std::visit([](const auto& value) { return nb::object(nb::cast(value)); }, value);
}

nb::dict explain(const std::string& op, nb::dict given, const std::string& device) {
    Explanation explanation;
    schema::for_each_operator([&](auto wanted) {
        using Operator = decltype(wanted);
        if (op != Operator::kName) return;
        const Arguments<Operator> arguments(given);
        const std::string named = device.empty() ? arguments.device() : device;
        if constexpr (std::is_same_v<Operator, schema::Linear>) load_tuned_of(named);
        explanation = octavo::explain(arguments.args, named);
    });
    nb::dict plan, why_not, result;
    for (const auto& [name, value] : explanation.plan) plan[name.c_str()] = to_python(value);
    for (const auto& [kernel, reason] : explanation.why_not) why_not[kernel.c_str()] = reason;
    result["kernel"] = explanation.kernel;
    result["summary"] = explanation.summary;
    result["file"] = explanation.file;
    result["plan"] = plan;
    result["why_not"] = why_not;
    result["text"] = explanation.to_string();
    return result;
}

}  // namespace

void bind_explain(nb::module_& m) {
    m.def("explain", &explain, nb::arg("operator"), nb::arg("arguments"), nb::arg("device"),
          nb::sig("def explain(operator: str, arguments: dict[str, object], device: str) -> dict[str, "
                  "typing.Any]"),
          "The fields of octavo.Explanation; `device` is empty for that of the arrays.");
}

}  // namespace octavo::bindings
