// octavo._core: the native half of the package octavo.
#include <octavo/build_info.h>
#include <octavo/error.h>

#include "bindings/bindings.h"
#include "bindings/scalars.h"
#include "common/online_softmax.h"
#include "cpu/thread_pool.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace octavo::bindings {

void bind_errors(nb::module_& m) {
    // The last one registered is asked first.
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const ValueError& error) {
            PyErr_SetString(PyExc_ValueError, error.what());
        } catch (const TypeError& error) {
            PyErr_SetString(PyExc_TypeError, error.what());
        } catch (const Error& error) {
            PyErr_SetString(PyExc_RuntimeError, error.what());
        }
    });
    nb::exception<OutOfPages> out_of_pages(m, "OutOfPages", PyExc_RuntimeError);
    out_of_pages.attr("__module__") = "octavo";
    out_of_pages.doc() =
        "The page allocator has too few free pages. Its state is as before the call.\n\n"
        "Attributes:\n"
        "    indices: tuple of int: where a call takes several sequences, the positions of those that did "
        "not "
        "fit.";
    out_of_pages.attr("indices") = nb::tuple();  // of every call that takes one sequence
    // This one is asked before the translator that nb::exception registered, which knows the message only.
    nb::register_exception_translator(
        [](const std::exception_ptr& thrown, void* type) {
            try {
                std::rethrow_exception(thrown);
            } catch (const OutOfPages& error) {
                if (error.indices.empty()) throw;
                nb::object raised = nb::borrow(static_cast<PyObject*>(type))(error.what());
                raised.attr("indices") = nb::tuple(nb::cast(error.indices));
                PyErr_SetObject(static_cast<PyObject*>(type), raised.ptr());
            }
        },
        out_of_pages.ptr());
    nb::exception<InvalidSequence> invalid_sequence(m, "InvalidSequence", PyExc_ValueError);
    invalid_sequence.attr("__module__") = "octavo";
    invalid_sequence.doc() = "A handle that was freed, or that this page allocator never gave out.";
}

void bind_info(nb::module_& m) {
    m.attr("__version__") = build_info().version;
    m.def(
        "build_info",
        [] {
            const BuildInfo& info = build_info();
            nb::dict dict;
            dict["version"] = info.version;
            dict["cuda_version"] = info.cuda_version;
            dict["why_cpu_only"] = info.why_cpu_only;
            dict["architectures"] = info.architectures;
            dict["instances"] = info.instances;
            dict["compiler"] = info.compiler;
            return dict;
        },
        nb::sig("def build_info() -> octavo._types.BuildInfo"),
        "What this build holds: a dict of version, cuda_version (empty without CUDA), why_cpu_only (why a "
        "build is without CUDA and how to get one with it; empty with CUDA), architectures, instances (the "
        "CUDA kernels compiled) and compiler.");
    m.def(
        "cpu_info",
        [] {
            const CpuInfo info = cpu_info();
            nb::dict dict;
            dict["isa"] = info.isa;
            dict["features"] = info.features;
            dict["num_threads"] = info.num_threads;
            return dict;
        },
        nb::sig("def cpu_info() -> octavo._types.CpuInfo"));
    m.def(
        "gpu_info",
        [] {
            std::string why_none;
            nb::list gpus;
            for (const GpuInfo& info : gpu_info(&why_none)) {
                nb::dict dict;
                dict["index"] = info.index;
                dict["name"] = info.name;
                dict["compute_major"] = info.compute_major;
                dict["compute_minor"] = info.compute_minor;
                dict["num_sms"] = info.num_sms;
                dict["memory_bytes"] = info.memory_bytes;
                gpus.append(dict);
            }
            return nb::make_tuple(gpus, why_none);
        },
        nb::sig("def gpu_info() -> tuple[list[octavo._types.GpuInfo], str]"));
    m.def(
        "set_num_threads",
        [](nb::handle num_threads) {
            constexpr const char* op = "set_num_threads";
            const int64_t count = int_argument(op, "num_threads", num_threads);
            cpu::check_num_threads(count);  // before it becomes an int
            set_num_threads(static_cast<int>(count));
        },
        nb::arg("num_threads"), nb::sig("def set_num_threads(num_threads: int) -> None"),
        "Use this many threads, from 1 to 65536, in the CPU operators. The default is the environment "
        "variable "
        "OCTAVO_NUM_THREADS, else the number of cores that the process may run on.");
    m.def(
        "softmax_phi_window",
        [](bool is_float16) {
            const UnifiedMax window = is_float16 ? UnifiedMax::of_float16(0.0f) : UnifiedMax::of_wide(0.0f);
            return nb::make_tuple(window.below, window.above);
        },
        nb::arg("is_float16"), nb::sig("def softmax_phi_window(is_float16: bool) -> tuple[float, float]"),
        "How far below softmax_phi and how far above it the maximum of a row may lie, in units of log2(e), "
        "by the type of softmax weights.");
    m.def("get_num_threads", &get_num_threads, "The number of threads that the CPU operators use.");
}

}  // namespace octavo::bindings

NB_MODULE(_core, m) {
    using namespace octavo::bindings;
    nb::set_leak_warnings(false);  // it would report what a daemon thread still holds at exit
    m.doc() = "The native half of octavo. Its functions are documented, and given defaults, by the package.";
    bind_errors(m);
    bind_info(m);
    bind_owned_array(m);
    bind_operators(m);
    bind_explain(m);
    bind_linear_plans(m);
    bind_xla_operators(m);
    bind_step_arrays(m);
    bind_page_allocator(m);
}
