// The operators for JAX programs, derived from operators/schema.h: handlers that XLA calls, and the check of
// their arguments at trace time. Who names their arrays and options: python/octavo/_jax_call.py.
#include "bindings/bindings.h"
#include "bindings/linear_plans.h"
#include "bindings/results.h"
#include "bindings/scalars.h"
#include "bindings/xla_call.h"
#include "cuda/backend.h"
#include "cuda/linear/library.h"
#include "operators/schema.h"

#include <nanobind/stl/string.h>

#include <new>

namespace octavo::bindings {
namespace {

template <class Argument, class Args>
void take(const XlaCall& call, const Argument& argument, Args& args) {
    if constexpr (!Argument::kIsArray) {
        using Number = typename Argument::Number;
        if constexpr (std::is_enum_v<Number>) {
            const auto given = call.option<std::string_view>(argument.name);
            if (given) args.*argument.member = named_argument<Number>(call.op(), argument.name, *given);
        } else {
            using Attribute = std::conditional_t<std::is_floating_point_v<Number>, double, Number>;
            const std::optional<Attribute> given = call.option<Attribute>(argument.name);
            if (given) args.*argument.member = static_cast<Number>(*given);
        }
    } else if constexpr (Argument::kIsRequired) {
        args.*argument.member = call.array(argument.name, argument.accept);
    } else {
        args.*argument.member = call.optional_array(argument.name, argument.accept);
    }
}

template <class Operator>
typename Operator::Args arguments(const XlaCall& call) {
    typename Operator::Args args;
    schema::for_each_argument<Operator>([&](const auto& argument) { take(call, argument, args); });
    return args;
}

// XLA may capture the handlers into CUDA graphs, and does so again whenever a buffer has moved: a call
// launches what shapes and attributes say, and a graph owns the workspace of its kernels (cuda/workspace.h).
void describe(const xla::MetadataExtension& extension) {
    extension.metadata->version.major = xla::kMajorVersion;
    extension.metadata->version.minor = xla::kMinorVersion;
    extension.metadata->traits = xla::kCommandBufferCompatible;
}

xla::Error* make_error(const xla::CallFrame& frame, xla::ErrorCode code, const char* message) {
    xla::MakeError error{{sizeof(xla::MakeError), nullptr}, message, code};
    return frame.api->make_error(&error);
}

// XLA calls it without Python's lock, from any thread.
template <class Operator, DeviceType kDevice>
xla::Error* handle(xla::CallFrame* frame) {
    for (const xla::Extension* it = frame->header.extensions; it; it = it->next) {
        if (it->kind != xla::kMetadataExtension) continue;
        describe(*reinterpret_cast<const xla::MetadataExtension*>(it));
        return nullptr;
    }
    try {
        void* stream = nullptr;
        Device device{kDevice, 0};
        if (kDevice == DeviceType::cuda) {
            xla::GetStream get{{sizeof(xla::GetStream), nullptr}, frame->context, nullptr};
            if (xla::Error* error = frame->api->get_stream(&get)) return error;
            stream = get.stream;
            // XLA makes a program's device current while it runs; a captured stream does not tell its own.
            device.index = cuda::current_device();
        }
        auto args = arguments<Operator>(XlaCall(Operator::kName, *frame, device));
        args.stream = stream;
        Operator::kRun(args);
        if constexpr (kLeavesPadding<Operator>) {
            Padding padding;
            add_padding(args, args.out, padding);
            if (args.lse) add_padding(args, *args.lse, padding);
            clear_padding(padding, device, stream);
        }
        return nullptr;
    } catch (const DeviceError& error) {
        return make_error(*frame, xla::kInternal, error.what());
    } catch (const Error& error) {
        return make_error(*frame, xla::kInvalidArgument, error.what());
    } catch (const std::bad_alloc&) {
        return make_error(*frame, xla::kResourceExhausted, "out of memory");
    } catch (const std::exception& error) {
        return make_error(*frame, xla::kUnknown, error.what());
    }
}

nb::dict xla_handlers() {
    nb::dict handlers;
    schema::for_each_operator([&](auto op) {
        using Operator = decltype(op);
        auto capsule = [](xla::Error* (*handler)(xla::CallFrame*)) {
            return nb::capsule(reinterpret_cast<const void*>(handler));
        };
        handlers[Operator::kName] = nb::make_tuple(capsule(&handle<Operator, DeviceType::cpu>),
                                                   capsule(&handle<Operator, DeviceType::cuda>));
    });
    return handlers;
}

std::string check_xla_call(nb::str name, nb::list arrays, nb::dict options) {
    std::string why_not_on_cuda;
    schema::for_each_operator([&](auto op) {
        using Operator = decltype(op);
        if (!name.equal(nb::str(Operator::kName))) return;
        const auto params = Operator::kCheck(arguments<Operator>(XlaCall(Operator::kName, arrays, options)));
        why_not_on_cuda = why_refused_on_cuda(params);
    });
    return why_not_on_cuda;
}

// Whether a program for CUDA had better multiply by JAX: on the GPU of this process, or on an H100 where
// there is none.
bool jax_multiplies(nb::list arrays, nb::dict options) {
    const LinearParams params = check_linear(arguments<schema::Linear>(XlaCall("linear", arrays, options)));
    const bool has_gpu = !cuda::gpu_info(nullptr).empty();
    if (has_gpu) load_tuned_once(0);
    return !cuda::why_library(params, has_gpu ? cuda::gpu_of(0) : *cuda::find_gpu("h100")).empty();
}

}  // namespace

void bind_xla_operators(nb::module_& m) {
    m.def("xla_handlers", &xla_handlers, nb::sig("def xla_handlers() -> dict[str, tuple[object, object]]"),
          "For each operator the capsules of its handlers for the platforms cpu and CUDA.");
    m.def(
        "check_xla_call", &check_xla_call, nb::arg("op"), nb::arg("arrays"), nb::arg("options"),
        nb::sig("def check_xla_call(op: str, arrays: list[tuple[str, str, tuple[int, ...]]], options: "
                "dict[str, bool | int | float | str]) -> str"),
        "Raise what the operator's handler would on the CPU, as far as shapes, dtypes and options tell, and "
        "return why it is refused on CUDA, or an empty string. The arrays are (name, dtype, shape), the "
        "results among them.");
    m.def("jax_multiplies", &jax_multiplies, nb::arg("arrays"), nb::arg("options"),
          nb::sig("def jax_multiplies(arrays: list[tuple[str, str, tuple[int, ...]]], options: "
                  "dict[str, bool | int | float | str]) -> bool"),
          "Whether a program for CUDA had better compute this linear() by JAX.");
}

}  // namespace octavo::bindings
