// The operators for Python, derived from operators/schema.h: import the arguments, call, hand over the
// results.
#include "bindings/bindings.h"
#include "bindings/import_array.h"
#include "bindings/linear_plans.h"
#include "bindings/make_array.h"
#include "bindings/results.h"
#include "bindings/scalars.h"
#include "checks/attention_arguments.h"
#include "common/print_kernels.h"
#include "cuda/backend.h"
#include "cuda/linear/library.h"
#include "operators/schema.h"

#include <octavo/paged_attention.h>

#include <nanobind/stl/optional.h>

#include <array>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace octavo::bindings {
namespace {

using schema::Access;

// What Python passes to an operator: a value for each argument that is no result, in the order of the
// description; then, if a result is optional, whether it is asked for where a keyword does that; then, but
// for merge_states, whose results are always new, an array or None for each of the others; then, for linear,
// the plan; then stream.
template <class Operator>
constexpr size_t kNumInputs = schema::count<Operator>([](const auto& a) { return !a.is_result(); });
template <class Operator>
constexpr size_t kNumResults = schema::count<Operator>([](const auto& a) { return a.is_result(); });
template <class Operator>
constexpr size_t kNumAsked = schema::count<Operator>([](const auto& a) { return a.is_asked(); });
template <class Operator>
constexpr bool kTakesResults = !std::is_same_v<Operator, schema::MergeStates>;
template <class Operator>
constexpr bool kTakesPlan = std::is_same_v<Operator, schema::Linear>;
template <class Operator>
using Given =
    std::array<nb::handle, kNumInputs<Operator> + (kTakesResults<Operator> ? kNumResults<Operator> : 0) +
                               (kTakesPlan<Operator> ? 2 : 1)>;

// Some numbers, such as k_scale, may be arrays, for which Args has a member of its own. Returns whether
// `given` is such an array, which is taken. For these numbers, what is neither is refused.
template <class Operator>
bool take_in_place(Call& call, const char* number, nb::handle given, typename Operator::Args& args) {
    if (given.is_none() || PyFloat_Check(given.ptr())) return false;
    bool taken = false;
    schema::for_each_argument<Operator>([&](const auto& argument) {
        if constexpr (std::decay_t<decltype(argument)>::kIsArray) {
            if (!argument.in_place_of || std::string_view(argument.in_place_of) != number) return;
            taken = is_array(given);
            if (taken)
                args.*argument.member = call.input(number, given, argument.accept);
            else
                float_argument(call.op(), number, given, "a float, or an array of float32");
        }
    });
    return taken;
}

template <class Operator, class Argument, class Args>
void take(Call& call, const Argument& argument, nb::handle given, Args& args) {
    if constexpr (Argument::kIsArray) {
        if (!Argument::kIsRequired && given.is_none()) return;
        const char* const name = argument.in_place_of ? argument.in_place_of : argument.name;
        args.*argument.member = argument.access == Access::write ? call.output(name, given, argument.accept)
                                                                 : call.input(name, given, argument.accept);
    } else if (!take_in_place<Operator>(call, argument.name, given, args)) {
        args.*argument.member = scalar_argument<typename Argument::Value>(call.op(), argument.name, given);
    }
}

template <class Operator>
void take_inputs(Call& call, const Given<Operator>& given, typename Operator::Args& args) {
    const nb::handle* next = given.data();
    schema::for_each_argument<Operator>([&](const auto& argument) {
        if (!argument.is_result()) take<Operator>(call, argument, *next++, args);
    });
}

// Where there is a second cache, either may be in host memory, and then does not decide the device. So
// `copies` come last.
template <>
void take_inputs<schema::CopyPages>(Call& call, const Given<schema::CopyPages>& given, CopyPagesArgs& args) {
    const auto& [k_pages, v_pages, copies, to_k_pages, to_v_pages, k_scales, v_scales, to_k_scales,
                 to_v_scales, stream] = given;
    const bool is_within = to_k_pages.is_none() && to_v_pages.is_none();
    auto from = [&](const char* name, nb::handle array, Accept accept) {
        return is_within ? call.output(name, array, accept) : call.input_or_host(name, array, accept);
    };
    args.k_pages = from("k_pages", k_pages, Accept::cache);
    args.v_pages = from("v_pages", v_pages, Accept::cache);
    auto to = [&](const char* name, nb::handle array, Accept accept, std::optional<TensorView>& view) {
        if (!array.is_none()) view = call.output_or_host(name, array, accept);
    };
    to("to_k_pages", to_k_pages, Accept::cache, args.to_k_pages);
    to("to_v_pages", to_v_pages, Accept::cache, args.to_v_pages);
    if (!k_scales.is_none()) args.k_scales = from("k_scales", k_scales, Accept::scales);
    if (!v_scales.is_none()) args.v_scales = from("v_scales", v_scales, Accept::scales);
    to("to_k_scales", to_k_scales, Accept::scales, args.to_k_scales);
    to("to_v_scales", to_v_scales, Accept::scales, args.to_v_scales);
    args.copies = call.input("copies", copies, Accept::integer);
    const bool is_list = PyList_Check(copies.ptr()) || PyTuple_Check(copies.ptr());
    if (is_list && args.copies.ndim == 1 && args.copies.shape[0] == 0)  // a list of no pairs
        args.copies = TensorView(args.copies.data, args.copies.dtype, {0, 2}, args.copies.device);
}

// The arrays that the operator writes its results to: those of the caller, or new ones.
template <class Operator>
std::vector<ResultArray> make_results(Call& call, const Given<Operator>& given,
                                      typename Operator::Args& args) {
    std::vector<ResultArray> results;
    results.reserve(kNumResults<Operator>);
    const nb::handle* asks = given.data() + kNumInputs<Operator>;
    const nb::handle* next = asks + kNumAsked<Operator>;
    schema::for_each_argument<Operator>([&](const auto& argument) {
        if constexpr (std::decay_t<decltype(argument)>::kIsArray) {
            if (!argument.is_result()) return;
            nb::handle array = Py_None;
            if (argument.asked_by) {
                if (!bool_argument(call.op(), argument.asked_by, *asks++)) return;
            } else {
                if (kTakesResults<Operator>) array = *next++;
                if (array.is_none() && !is_given(args.*argument.like)) return;
            }
            results.emplace_back(call, argument.name, array, shape_of_result(argument, args));
            args.*argument.member = results.back().view();
        }
    });
    return results;
}

// Checks a product on a GPU that the library of the arrays computes faster, or alone, and hands it over.
// Returns nothing where Octavo computes it.
std::optional<nb::object> hand_over_linear(Call& call, const Given<schema::Linear>& given, LinearArgs args) {
    const auto& [x, w, bias, activation, residual, static_weight, batch_invariant, norm_weight, norm_eps, out,
                 plan, stream] = given;
    args.out = shape_of_result(
        std::get<schema::kNumArguments<schema::Linear> - 1>(schema::Linear::kArguments), args);
    if (!out.is_none())
        args.out = call.output("out", out);
    else
        args.out.data = reinterpret_cast<void*>(uintptr_t{1} << 56);  // apart from what there is
    load_tuned_once(args.x.device.index);
    const LinearParams params = check_linear(args);
    const std::string why_refused = why_refused_on_cuda(params);
    if (!why_refused.empty()) fail<TypeError>(call.op(), why_refused);
    const cuda::Gpu& gpu = cuda::gpu_of(params.device.index);
    if (cuda::why_library(params, gpu).empty()) return std::nullopt;
    if (prints_kernels()) print_kernel(cuda::explain(params, gpu));
    nb::object address = nb::none();  // of the caller's stream
    if (!stream.is_none() && !call.is_of_dispatcher())
        address = nb::int_(reinterpret_cast<uintptr_t>(call.stream()));
    return nb::module_::import_("octavo._linear_on_cuda")
        .attr("linear")(x, w, bias, activation, residual, norm_weight, norm_eps, out, address);
}

template <class Operator>
nb::object run(const Given<Operator>& given) {
    Call call(Operator::kName, given.back());
    typename Operator::Args args;
    take_inputs<Operator>(call, given, args);
    if constexpr (kTakesPlan<Operator>) {
        args.plan = plan_argument(call.op(), given[given.size() - 2]);
        if (args.x.device.type == DeviceType::cuda) {
            if (std::optional<nb::object> out = hand_over_linear(call, given, args)) return *out;
        }
    }
    std::vector<ResultArray> results = make_results<Operator>(call, given, args);
    args.stream = call.stream();
    call.run([&] {
        Operator::kRun(args);
        if constexpr (kLeavesPadding<Operator>) {
            Padding padding;
            for (const ResultArray& result : results) {
                if (result.is_new()) add_padding(args, result.view(), padding);
            }
            clear_padding(padding, args.q.device, args.stream);
        }
    });
    if (results.empty()) return nb::none();
    if (results.size() == 1) return results.front().finish();
    nb::object all = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
    for (size_t i = 0; i < results.size(); ++i)
        PyTuple_SetItem(all.ptr(), static_cast<Py_ssize_t>(i), results[i].finish().release().ptr());
    return all;
}

template <size_t>
using Handle = nb::handle;

// The function takes its arguments by position only. Any of them may be None here; the operator says which
// may not.
template <class Operator, size_t... I>
void define(nb::module_& m, std::index_sequence<I...>) {
    m.def(
        Operator::kName, [](Handle<I>... given) { return run<Operator>({given...}); },
        nb::sig((std::string("def ") + Operator::kName + "(*args: object) -> object").c_str()),
        (static_cast<void>(I), nb::arg().none())...);
}

void check_page_table(nb::handle page_table, nb::handle seq_lens, nb::handle num_pages, nb::handle page_size,
                      nb::handle max_positions, nb::handle stream) {
    constexpr const char* op = "check_page_table";
    Call call(op, stream);
    const TensorView table = call.input("page_table", page_table, Accept::integer);
    const TensorView lengths = call.input("seq_lens", seq_lens, Accept::integer);
    const int64_t pages = int_argument(op, "num_pages", num_pages);
    const int64_t size = int_argument(op, "page_size", page_size);
    const auto positions = scalar_argument<std::optional<int64_t>>(op, "max_positions", max_positions);
    call.run([&] { octavo::check_page_table(table, lengths, pages, size, call.stream(), positions); });
}

const char* to_string(Access access) {
    switch (access) {
        case Access::read: return "read";
        case Access::write: return "write";
        case Access::result: break;
    }
    return "result";
}

template <class Argument, class Args>
nb::dict describe(const Argument& argument, const Args& defaults) {
    nb::dict description;
    description["name"] = argument.name;
    if constexpr (Argument::kIsArray) {
        description["type"] = "array";
        description["access"] = to_string(argument.access);
        description["default"] = nb::none();
        if (argument.in_place_of) description["in_place_of"] = argument.in_place_of;
    } else if constexpr (std::is_enum_v<typename Argument::Number>) {
        static_assert(Argument::kIsOptional);
        description["type"] = "str";
        description["access"] = to_string(Access::read);
        description["default"] = nb::none();
    } else {
        using Number = typename Argument::Number;
        const char* number = std::is_integral_v<Number> ? "int" : "float";
        description["type"] = std::is_same_v<Number, bool> ? "bool" : number;
        description["access"] = to_string(Access::read);
        description["default"] = defaults.*argument.member;
    }
    description["required"] = Argument::kIsRequired;
    return description;
}

nb::dict operator_arguments() {
    nb::dict operators;
    schema::for_each_operator([&](auto op) {
        using Operator = decltype(op);
        const typename Operator::Args defaults;
        nb::list arguments;
        schema::for_each_argument<Operator>(
            [&](const auto& argument) { arguments.append(describe(argument, defaults)); });
        operators[Operator::kName] = arguments;
    });
    return operators;
}

}  // namespace

// Names and types are in octavo/_attention.py, octavo/_attention_backward.py, octavo/_paged_attention.py,
// octavo/_linear.py, octavo/_rms_norm.py and octavo/_latent_attention.py, the keywords and their defaults are
// added by octavo/_operators.py.
void bind_operators(nb::module_& m) {
    schema::for_each_operator([&](auto op) {
        using Operator = decltype(op);
        define<Operator>(m, std::make_index_sequence<std::tuple_size_v<Given<Operator>>>());
    });
    m.def("check_page_table", &check_page_table, nb::arg().none(), nb::arg().none(), nb::arg().none(),
          nb::arg().none(), nb::arg().none(), nb::arg().none(),
          nb::sig("def check_page_table(*args: object) -> None"));
    m.def(
        "check_head_dim",
        [](const char* op, const char* name, nb::handle head_dim) {
            check_head_dim(op, name, int_argument(op, name, head_dim));
        },
        nb::sig("def check_head_dim(op: str, name: str, head_dim: int) -> None"),
        "Refuses what the operators of attention refuse, for caches that are made for them.");
    m.def("operator_arguments", &operator_arguments,
          nb::sig("def operator_arguments() -> dict[str, list[octavo._types.Argument]]"),
          "The arguments of each operator, in the order of its function here; results come last.");
    m.attr("torch_dispatcher") = torch_dispatcher();
}

}  // namespace octavo::bindings
