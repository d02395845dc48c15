#include "bindings/array_type.h"

#include "bindings/scalars.h"

#include <array>
#include <string_view>
#include <utility>

namespace octavo::bindings {
namespace {

bool is_subclass_of(nb::handle type, const char* module, const char* name) {
    nb::object loaded = nb::steal(PyImport_GetModule(nb::str(module).ptr()));
    if (!loaded.is_valid()) {
        PyErr_Clear();
        return false;
    }
    nb::object base = nb::getattr(loaded, name, nb::none());
    return PyType_Check(base.ptr()) && PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.ptr()),
                                                        reinterpret_cast<PyTypeObject*>(base.ptr()));
}

Framework framework_of(nb::handle type) {
    if (!nb::hasattr(type, "__dlpack__") || !nb::hasattr(type, "__dlpack_device__")) return Framework::none;
    if (is_subclass_of(type, "numpy", "ndarray")) return Framework::numpy;
    if (is_subclass_of(type, "torch", "Tensor")) return Framework::torch;
    if (is_subclass_of(type, "cupy", "ndarray")) return Framework::cupy;
    // jax.Array is an abstract class; arrays and tracers come from jaxlib and jax.
    nb::object module = nb::getattr(type, "__module__", nb::none());
    if (nb::isinstance<nb::str>(module)) {
        const std::string_view name = utf8_of(module).value_or("");
        if (name.rfind("jaxlib", 0) == 0 || name == "jax" || name.rfind("jax.", 0) == 0)
            return Framework::jax;
    }
    return Framework::other;
}

const dlpack::ExchangeApi* exchange_api_of(nb::handle type) {
    constexpr const char* name = "dlpack_exchange_api";
    nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), name)) return nullptr;
    auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), name));
    while (api && api->version.major != dlpack::kMajorVersion) api = api->previous;
    const bool complete = api && api->allocate && api->managed_tensor_from_object &&
                          api->managed_tensor_to_object && api->current_stream;
    return complete ? api : nullptr;
}

// The types seen last. The interpreter lock guards it, and `mutex` where there is none; a type in it is kept
// alive, so that its address means this type.
struct TypeCache {
    static constexpr size_t kSize = 16;
    nb::ft_mutex mutex;
    std::array<PyObject*, kSize> types{};
    std::array<ArrayType, kSize> found{};
    size_t next = 0;
};

}  // namespace

ArrayType array_type_of(nb::handle object) {
    static TypeCache cache;
    nb::handle type = object.type();
    {
        const nb::ft_lock_guard lock(cache.mutex);
        for (size_t i = 0; i < TypeCache::kSize; ++i) {
            if (cache.types[i] == type.ptr()) return cache.found[i];
        }
    }
    ArrayType found;
    found.framework = framework_of(type);
    if (found.framework == Framework::none) return found;  // refused anyway
    found.exchange = exchange_api_of(type);
    found.is_masked = is_subclass_of(type, "numpy.ma", "MaskedArray");
    if (found.framework == Framework::torch) {
        const nb::object base = nb::module_::import_("torch").attr("Tensor");
        found.has_torch_dispatch = !type.attr("__torch_dispatch__").is(base.attr("__torch_dispatch__"));
    }
    PyObject* evicted = type.inc_ref().ptr();
    {
        const nb::ft_lock_guard lock(cache.mutex);
        std::swap(evicted, cache.types[cache.next]);
        cache.found[cache.next] = found;
        cache.next = (cache.next + 1) % TypeCache::kSize;
    }
    Py_XDECREF(evicted);
    return found;
}

std::optional<void*> ArrayType::current_stream(Device device) const {
    if (exchange) {
        void* stream = nullptr;
        if (exchange->current_stream(dlpack::kCuda, device.index, &stream)) throw nb::python_error();
        return stream;
    }
    auto address = [](nb::object stream, const char* attribute) {
        return reinterpret_cast<void*>(nb::cast<uintptr_t>(stream.attr(attribute)));
    };
    if (framework == Framework::torch) {
        return address(nb::module_::import_("torch.cuda").attr("current_stream")(device.index),
                       "cuda_stream");
    }
    if (framework == Framework::cupy) {
        static PyObject* const current =
            nb::object(nb::module_::import_("cupy.cuda").attr("get_current_stream")).release().ptr();
        return address(nb::handle(current)(device.index), "ptr");
    }
    return std::nullopt;
}

}  // namespace octavo::bindings
