#include "bindings/make_array.h"

#include "bindings/bindings.h"
#include "bindings/scalars.h"
#include "common/fail.h"
#include "cuda/backend.h"

#include <algorithm>
#include <new>
#include <string_view>

namespace octavo::bindings {
namespace {

constexpr std::align_val_t kAlignment{64};  // XLA copies CPU arrays of less

bool is_in_c_order(const TensorView& view) {
    int64_t stride = 1;
    for (int axis = view.ndim - 1; axis >= 0; --axis) {
        if (view.strides[axis] != stride) return false;
        stride *= view.shape[axis];
    }
    return true;
}

// Memory is allocated on the legacy default stream, which outlives every stream of the caller's.
std::shared_ptr<void> allocate(Device device, size_t bytes) {
    if (device.type == DeviceType::cpu) {
        return {::operator new(bytes, kAlignment), [](void* p) { ::operator delete(p, kAlignment); }};
    }
    const int32_t index = device.index;
    return {cuda::allocate(index, bytes, nullptr), [index](void* p) { cuda::release(index, p, nullptr); }};
}

// What a capsule of ours holds: the tensor, its shape and a share of the memory.
template <class Managed>
struct Lent {
    Managed managed{};
    TensorView view;
    std::shared_ptr<void> memory;

    Lent(const TensorView& view, std::shared_ptr<void> memory) : view(view), memory(std::move(memory)) {
        managed.context = this;
        managed.deleter = [](Managed* self) { delete static_cast<Lent*>(self->context); };
        managed.tensor = {
            this->view.data,         to_dlpack(view.device),    view.ndim, to_dlpack(view.dtype),
            this->view.shape.data(), this->view.strides.data(), 0};
    }
};

template <class Managed>
nb::object make_capsule(std::unique_ptr<Lent<Managed>> lent, const char* name) {
    // A consumer renames the capsule and calls the deleter itself.
    auto destroy = [](PyObject* capsule) {
        for (const char* unused : {"dltensor", "dltensor_versioned"}) {
            if (!PyCapsule_IsValid(capsule, unused)) continue;
            auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, unused));
            managed->deleter(managed);
        }
    };
    nb::object capsule = nb::steal(PyCapsule_New(&lent->managed, name, destroy));
    if (!capsule.is_valid()) throw nb::python_error();
    lent.release();
    return capsule;
}

// Python's `with`.
class ContextManager {
  public:
    explicit ContextManager(nb::object manager) : manager_(std::move(manager)) {
        manager_.attr("__enter__")();
    }
    ContextManager(const ContextManager&) = delete;
    ~ContextManager() {
        nb::error_scope pending;
        try {
            manager_.attr("__exit__")(nb::none(), nb::none(), nb::none());
        } catch (nb::python_error& error) {
            error.discard_as_unraisable(manager_);
        }
    }

  private:
    nb::object manager_;
};

// An array of the first array's framework: NumPy, CuPy or torch.
nb::object make_empty(const Call& call, const TensorView& view) {
    const bool like_first = view.dtype == call.first_view().dtype;
    const nb::object dtype = like_first ? call.first_array().attr("dtype") : nb::object(nb::str("float32"));
    nb::list shape;
    for (int axis = 0; axis < view.ndim; ++axis) shape.append(view.shape[axis]);
    if (call.first_type().framework == Framework::numpy) {
        return nb::module_::import_("numpy").attr("empty")(shape, dtype);
    }
    if (call.first_type().framework == Framework::cupy) {
        nb::module_ cupy = nb::module_::import_("cupy");
        const ContextManager device(cupy.attr("cuda").attr("Device")(view.device.index));
        return cupy.attr("empty")(shape, dtype);
    }
    nb::module_ torch = nb::module_::import_("torch");
    return torch.attr("empty")(nb::tuple(shape), nb::arg("device") = to_string(view.device).c_str(),
                               nb::arg("dtype") = like_first ? dtype : torch.attr("float32"));
}

void set_error(void*, const char* kind, const char* message) {
    PyErr_SetString(std::string_view(kind) == "MemoryError" ? PyExc_MemoryError : PyExc_RuntimeError,
                    message);
}

}  // namespace

OwnedArray::OwnedArray(const TensorView& view, void* stream) : view_(view), stream_(stream) {
    int64_t stride = 1;
    for (int axis = view_.ndim - 1; axis >= 0; --axis) {
        view_.strides[axis] = stride;
        stride *= view_.shape[axis];
    }
    const int64_t bytes = view_.size() * size_of(view_.dtype);
    memory_ = allocate(view_.device, bytes > 0 ? static_cast<size_t>(bytes) : 1);
    view_.data = memory_.get();
}

nb::object OwnedArray::dlpack(nb::handle stream, nb::handle max_version, nb::handle dl_device,
                              nb::handle copy) const {
    if (!dl_device.is_none() && !dl_device.equal(dlpack_device())) {
        throw nb::buffer_error("an octavo result cannot be exported to another device");
    }
    if (copy.ptr() == Py_True) throw nb::buffer_error("an octavo result cannot be copied on export");
    if (view_.device.type == DeviceType::cuda) {
        const int64_t consumer = stream.is_none() ? 1 : nb::cast<int64_t>(stream);
        void* address = consumer == 1 ? nullptr : reinterpret_cast<void*>(consumer);
        if (consumer != -1 && address != stream_) cuda::order_streams(view_.device.index, stream_, address);
    }
    const bool versioned =
        !max_version.is_none() && nb::cast<int64_t>(max_version[0]) >= dlpack::kMajorVersion;
    if (versioned) {
        auto lent = std::make_unique<Lent<dlpack::ManagedTensorVersioned>>(view_, memory_);
        lent->managed.version = {dlpack::kMajorVersion, dlpack::kMinorVersion};
        return make_capsule(std::move(lent), "dltensor_versioned");
    }
    return make_capsule(std::make_unique<Lent<dlpack::ManagedTensor>>(view_, memory_), "dltensor");
}

nb::tuple OwnedArray::dlpack_device() const {
    const dlpack::Device device = to_dlpack(view_.device);
    return nb::make_tuple(device.type, device.id);
}

ResultArray::ResultArray(Call& call, const char* name, nb::handle given, const TensorView& wanted) {
    if (!given.is_none()) {
        array_ = nb::borrow(given);
        view_ = call.output(name, array_);
        is_new_ = false;
        return;
    }
    const ArrayType& type = call.first_type();
    view_ = wanted;
    view_.device = call.first_view().device;
    if (type.exchange && call.is_of_dispatcher()) {
        make_tensor(call);
    } else if (type.exchange) {
        make_exchanged(type);
    } else if (type.framework == Framework::jax || type.framework == Framework::other) {
        make_owned(call, name);
    } else {
        array_ = make_empty(call, view_);
        view_ = call.output(name, array_);
    }
}

void ResultArray::make_exchanged(const ArrayType& type) {
    dlpack::Tensor prototype{};
    prototype.device = to_dlpack(view_.device);
    prototype.ndim = view_.ndim;
    prototype.dtype = to_dlpack(view_.dtype);
    prototype.shape = view_.shape.data();
    dlpack::ManagedTensorVersioned* made = nullptr;
    if (type.exchange->allocate(&prototype, &made, nullptr, set_error)) throw nb::python_error();
    view_.data = static_cast<char*>(made->tensor.data) + made->tensor.byte_offset;
    std::copy_n(made->tensor.strides, view_.ndim, view_.strides.begin());
    void* object = nullptr;
    if (type.exchange->managed_tensor_to_object(made, &object)) throw nb::python_error();
    array_ = nb::steal(static_cast<PyObject*>(object));
}

void ResultArray::make_tensor(const Call& call) {
    static PyObject* const torch = nb::module_::import_("torch").release().ptr();
    static PyObject* const empty_like = nb::handle(torch).attr("empty_like").ptr();
    static PyObject* const new_empty = nb::handle(torch).attr("Tensor").attr("new_empty").ptr();
    const TensorView& first = call.first_view();
    const bool has_its_shape = view_.ndim == first.ndim && view_.shape == first.shape;
    if (has_its_shape && view_.dtype == first.dtype && is_in_c_order(first)) {
        array_ = nb::handle(empty_like)(call.first_array());
    } else {
        // The lengths are passed one by one: torch takes as long again to read a tuple of them.
        const nb::object args = nb::steal(PyTuple_New(1 + view_.ndim));
        PyTuple_SetItem(args.ptr(), 0, nb::borrow(call.first_array()).release().ptr());
        for (int axis = 0; axis < view_.ndim; ++axis) {
            PyTuple_SetItem(args.ptr(), 1 + axis, PyLong_FromLongLong(view_.shape[axis]));
        }
        nb::dict options;
        if (view_.dtype != first.dtype) options["dtype"] = nb::handle(torch).attr("float32");
        array_ = nb::steal(PyObject_Call(new_empty, args.ptr(), options.ptr()));
    }
    dlpack::Tensor made;
    if (!array_.is_valid() || call.first_type().exchange->tensor_from_object(array_.ptr(), &made)) {
        throw nb::python_error();
    }
    view_.data = static_cast<char*>(made.data) + made.byte_offset;
    std::copy_n(made.strides, view_.ndim, view_.strides.begin());
}

void ResultArray::make_owned(Call& call, const char* name) {
    if (call.first_type().framework == Framework::jax) {
        from_dlpack_ = nb::module_::import_("jax.dlpack").attr("from_dlpack");
    } else if (nb::hasattr(call.first_array(), "__array_namespace__")) {
        const nb::object get_namespace = call.first_array().attr("__array_namespace__");
        from_dlpack_ = call_object(get_namespace, nb::tuple()).attr("from_dlpack");
    } else {
        fail<TypeError>(call.op(), name, " cannot be made: ", bindings::type_name(call.first_array()),
                        " has no __array_namespace__");
    }
    OwnedArray owned(view_, call.stream());
    view_ = owned.view();
    array_ = nb::cast(std::move(owned));
    if (view_.device.type == DeviceType::cuda) call.order_after(nullptr);  // where its memory was made
}

nb::object ResultArray::finish() {
    return from_dlpack_.is_valid() ? call_object(from_dlpack_, nb::make_tuple(array_)) : array_;
}

void bind_owned_array(nb::module_& m) {
    nb::class_<OwnedArray>(m, "OwnedArray")
        .def("__dlpack__", &OwnedArray::dlpack, nb::kw_only(), nb::arg("stream").none() = nb::none(),
             nb::arg("max_version").none() = nb::none(), nb::arg("dl_device").none() = nb::none(),
             nb::arg("copy").none() = nb::none(),
             nb::sig(
                 "def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = "
                 "None, dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> object"))
        .def("__dlpack_device__", &OwnedArray::dlpack_device,
             nb::sig("def __dlpack_device__(self) -> tuple[int, int]"));
}

}  // namespace octavo::bindings
