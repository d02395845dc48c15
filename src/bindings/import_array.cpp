#include "bindings/import_array.h"

#include "bindings/derivatives.h"
#include "bindings/scalars.h"
#include "common/fail.h"
#include "cuda/backend.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace octavo::bindings {
namespace {

constexpr size_t kMostArrays = 16;  // of one call, without reallocation

constexpr const char* kVersionedCapsule = "dltensor_versioned";
constexpr const char* kUnversionedCapsule = "dltensor";

std::string dtype_name(dlpack::DataType dtype) {
    constexpr const char* kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex"};
    constexpr const char* small[] = {
        "bool",           "float8_e3m4",     "float8_e4m3",   "float8_e4m3b11fnuz",
        "float8_e4m3fn",  "float8_e4m3fnuz", "float8_e5m2",   "float8_e5m2fnuz",
        "float8_e8m0fnu", "float6_e2m3fn",   "float6_e3m2fn", "float4_e2m1fn"};
    const size_t code = dtype.code;
    std::string name = code < std::size(kinds)                      ? kinds[code] + std::to_string(dtype.bits)
                       : code - std::size(kinds) < std::size(small) ? small[code - std::size(kinds)]
                                                                    : "DLPack type " + std::to_string(code);
    return dtype.lanes == 1 ? name : name + "x" + std::to_string(dtype.lanes);
}

std::optional<DType> to_dtype(dlpack::DataType dtype) {
    for (DType known : kDTypes) {
        if (to_dlpack(known) == dtype) return known;
    }
    return std::nullopt;
}

Device to_device(const char* op, const char* name, dlpack::Device device) {
    switch (device.type) {
        case dlpack::kCpu:
        case dlpack::kCudaHost: return {DeviceType::cpu, 0};
        case dlpack::kCuda:
        case dlpack::kCudaManaged: return {DeviceType::cuda, device.id};
    }
    fail<DeviceError>(op, name, " must be on a CPU or CUDA device; it is on DLPack device type ",
                      device.type);
}

TensorView to_view(const char* op, const char* name, const dlpack::Tensor& tensor, Accept accept) {
    dlpack::DataType own = tensor.dtype;
    if (accept == Accept::words && own.code == dlpack::kUInt && own.bits >= 32) own.code = dlpack::kInt;
    if (accept == Accept::mask && own == dlpack::DataType{dlpack::kBool, 8, 1}) own.code = dlpack::kUInt;
    const std::optional<DType> dtype = to_dtype(own);
    const bool may_be_code = accept == Accept::cache || (accept == Accept::mask && dtype == DType::uint8);
    if (!dtype || (is_code(*dtype) && !may_be_code)) {
        refuse_dtype(op, name, accept, dtype_name(tensor.dtype));
    }
    if (tensor.ndim > TensorView::kMaxDims) {
        fail<ValueError>(op, name, " must have at most ", TensorView::kMaxDims, " axes; got ", tensor.ndim);
    }
    TensorView view;
    view.dtype = *dtype;
    view.device = to_device(op, name, tensor.device);
    view.ndim = tensor.ndim;
    std::copy_n(tensor.shape, tensor.ndim, view.shape.begin());
    if (tensor.strides) {
        std::copy_n(tensor.strides, tensor.ndim, view.strides.begin());
    } else {
        int64_t stride = 1;
        for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
            view.strides[axis] = stride;
            stride *= view.shape[axis];
        }
    }
    if (view.size() == 0) return view;
    if (!tensor.data) fail<TypeError>(op, name, " has no data (is it a meta or fake tensor?)");
    view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
    if (reinterpret_cast<uintptr_t>(view.data) % size_of(view.dtype) != 0) {
        fail<ValueError>(op, name, " must be aligned to its elements of ", size_of(view.dtype), " bytes");
    }
    return view;
}

bool is_deleted(nb::handle array) {
    if (array_type_of(array).framework != Framework::jax) return false;
    const nb::object method = nb::getattr(array, "is_deleted", nb::none());  // tracers have none
    return !method.is_none() && method().equal(nb::bool_(true));
}

bool has_bools(nb::handle array, const ArrayType& type) {
    if (type.framework == Framework::other) return false;
    const std::string dtype = str_of(nb::getattr(array, "dtype", nb::none()));
    return dtype == "bool" || dtype == "torch.bool";
}

bool is_name_of_int4(std::string_view dtype) { return dtype == "int4" || dtype == "uint4"; }

// Raises `type`, chained to the Python error being handled. KeyboardInterrupt and its like pass unchanged.
[[noreturn]] void refuse(nb::python_error& error, nb::handle type, const char* op, const char* name,
                         nb::handle array, Accept accept) {
    if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError))
        throw nb::python_error(std::move(error));
    if (is_deleted(array)) {
        nb::raise_from(error, PyExc_RuntimeError,
                       "%s: %s is a JAX array that was deleted, or donated to a jitted function", op, name);
    }
    std::string what = bindings::type_name(array);
    const nb::object dtype = nb::getattr(array, "dtype", nb::none());
    const std::string dtype_name = str_of(dtype);
    if (is_name_of_int4(dtype_name)) refuse_dtype(op, name, accept, dtype_name);  // none has them in DLPack
    if (!dtype.is_none()) what += " of " + dtype_name;
    std::string reason = str_of(error.value());
    reason.resize(std::min(reason.size(), reason.find('\n')));  // torch appends a stack trace
    nb::raise_from(error, type, "%s: %s (%s) cannot be taken through DLPack: %s", op, name, what.c_str(),
                   reason.c_str());
}

// Whether that is the name of a type that stands for an array while JAX traces a function.
bool is_jax_tracer(std::string_view type_name) {
    constexpr std::string_view module = "jax.", suffix = "Tracer";
    return type_name.size() > module.size() + suffix.size() && type_name.substr(0, module.size()) == module &&
           type_name.substr(type_name.size() - suffix.size()) == suffix;
}

Device device_of(const char* op, const char* name, nb::handle array, Accept accept) {
    nb::object pair;
    try {
        pair = call_object(array.attr("__dlpack_device__"), nb::tuple());
        return to_device(op, name,
                         {nb::cast<int32_t>(nb::int_(pair[0])), nb::cast<int32_t>(nb::int_(pair[1]))});
    } catch (nb::python_error& error) {
        refuse(error, PyExc_TypeError, op, name, array, accept);
    } catch (const nb::cast_error&) {
        fail<TypeError>(op, name,
                        ": __dlpack_device__ must return two 32-bit ints, (device type, device); got ",
                        nb::repr(pair).c_str());
    }
}

// Whether it may be the real or imaginary part of a complex tensor, which alone carry torch's negative bit:
// there is no complex bfloat16, and between two elements of a part lies one of the other. Views that
// as_strided makes of a part, across both, keep the bit and are dense; they are not found, since asking every
// tensor would add 60 ns each to calls of few microseconds.
bool may_be_part(const TensorView& view) {
    const int last = view.ndim - 1;
    const bool is_dense = last >= 0 && view.shape[last] > 1 && view.strides[last] == 1;
    return !is_dense && (view.dtype == DType::float32 || view.dtype == DType::float16);
}

void refuse_negative_bit(const char* op, const char* name, nb::handle tensor) {
    static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
    if (nb::cast<bool>(tensor.attr(nb::handle(is_neg))())) {
        fail<TypeError>(op, name, " has its negative bit set; use ", name, ".resolve_neg()");
    }
}

void require_cuda(const char* op) {
    try {
        cuda::require_usable();
    } catch (const DeviceError& error) {
        fail<DeviceError>(op, error.what());
    }
}

// The dtype of a NumPy or CuPy array; nothing if Octavo has no such dtype.
std::optional<DType> dtype_of(nb::handle array) {
    // The dtype objects seen last: NumPy has one object for each kind. The interpreter lock guards them, and
    // `mutex` where there is no such lock. An object in here is kept alive, so that its address means this
    // dtype.
    struct Seen {
        PyObject* object = nullptr;
        std::optional<DType> dtype;
    };
    static nb::ft_mutex mutex;
    static std::array<Seen, 8> cache{};
    static size_t next = 0;
    static PyObject* const attribute = PyUnicode_InternFromString("dtype");
    const nb::object object = array.attr(nb::handle(attribute));
    {
        const nb::ft_lock_guard lock(mutex);
        for (const Seen& seen : cache) {
            if (seen.object == object.ptr()) return seen.dtype;
        }
    }
    std::optional<DType> found;
    if (object.attr("isnative").equal(nb::bool_(true))) {
        const nb::object name = object.attr("name");
        for (DType dtype : kDTypes) {
            if (name.equal(nb::str(to_string(dtype).c_str()))) found = dtype;
        }
    }
    PyObject* evicted = nb::handle(object).inc_ref().ptr();
    {
        const nb::ft_lock_guard lock(mutex);
        std::swap(evicted, cache[next].object);
        cache[next].dtype = found;
        next = (next + 1) % cache.size();
    }
    Py_XDECREF(evicted);
    return found;
}

// Whether it is one of the dtypes that ml_dtypes adds to NumPy's.
bool is_of_ml_dtypes(DType dtype) {
    return dtype == DType::bfloat16 || dtype == DType::float8_e4m3fn || dtype == DType::float8_e5m2;
}

// Reads a CuPy array by its attributes, without the call and the capsule of its __dlpack__. Returns nothing
// where something is wrong, which __dlpack__ and to_view then say.
std::optional<TensorView> view_of_cupy(nb::handle array) {
    static PyObject* const data = PyUnicode_InternFromString("data");
    static PyObject* const pointer = PyUnicode_InternFromString("ptr");
    static PyObject* const device_id = PyUnicode_InternFromString("device_id");
    static PyObject* const lengths = PyUnicode_InternFromString("shape");
    static PyObject* const byte_strides = PyUnicode_InternFromString("strides");
    const std::optional<DType> dtype = dtype_of(array);
    if (!dtype) return std::nullopt;
    const nb::object memory = array.attr(nb::handle(data));
    const nb::tuple shape(array.attr(nb::handle(lengths))), strides(array.attr(nb::handle(byte_strides)));
    TensorView view;
    view.dtype = *dtype;
    view.device = {DeviceType::cuda, nb::cast<int32_t>(memory.attr(nb::handle(device_id)))};
    view.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(memory.attr(nb::handle(pointer))));
    const int64_t size = size_of(view.dtype);
    if (shape.size() > TensorView::kMaxDims || reinterpret_cast<uintptr_t>(view.data) % size != 0)
        return std::nullopt;
    view.ndim = static_cast<int32_t>(shape.size());
    for (int axis = 0; axis < view.ndim; ++axis) {
        view.shape[axis] = nb::cast<int64_t>(shape[axis]);
        const int64_t stride = nb::cast<int64_t>(strides[axis]);
        if (stride % size != 0) return std::nullopt;
        view.strides[axis] = stride / size;
    }
    return view;
}

}  // namespace

dlpack::DataType to_dlpack(DType dtype) {
    switch (dtype) {
        case DType::float32: return {dlpack::kFloat, 32, 1};
        case DType::float16: return {dlpack::kFloat, 16, 1};
        case DType::bfloat16: return {dlpack::kBfloat, 16, 1};
        case DType::int32: return {dlpack::kInt, 32, 1};
        case DType::int8: return {dlpack::kInt, 8, 1};
        case DType::float8_e4m3fn: return {dlpack::kFloat8E4m3fn, 8, 1};
        case DType::float8_e5m2: return {dlpack::kFloat8E5m2, 8, 1};
        case DType::uint8: return {dlpack::kUInt, 8, 1};
        case DType::int64: return {dlpack::kInt, 64, 1};
        case DType::int4: break;  // no array's
    }
    return {};
}

dlpack::Device to_dlpack(Device device) {
    return {device.type == DeviceType::cpu ? dlpack::kCpu : dlpack::kCuda, device.index};
}

std::optional<DType> dtype_named(std::string_view name, Accept accept) {
    if (accept == Accept::words && (name == "uint64" || name == "uint32")) name.remove_prefix(1);
    if (accept == Accept::mask && name == "bool") return DType::uint8;
    for (DType dtype : kDTypes) {
        if (name == to_string(dtype)) return dtype;
    }
    return std::nullopt;
}

void refuse_dtype(const char* op, std::string_view name, Accept accept, const std::string& got) {
    const char* wanted = "float32, float16 or bfloat16";
    const char* hint = "";
    switch (accept) {
        case Accept::int32: wanted = "int32"; break;
        case Accept::integer: wanted = "int32 or int64"; break;
        case Accept::words:
            wanted = "int64 or uint64, pairs of int32 or uint32, or bool";
            if (got == "bool") {
                hint =
                    " of a library that octavo.pack_tree_mask does not know, which takes arrays of NumPy, "
                    "PyTorch, JAX and CuPy";
            }
            break;
        case Accept::float32: wanted = "float32"; break;
        case Accept::scales: wanted = "float32 or float16"; break;
        case Accept::mask: wanted = "bool or uint8"; break;
        case Accept::cache:
            wanted = "float32, float16, bfloat16, int8, float8_e4m3fn, float8_e5m2 or uint8";
            if (is_name_of_int4(got)) {
                hint =
                    "; a cache of int4 is of uint8, its last axis head_dim / 2, the even dim in the lower "
                    "half of its byte, with kv_dtype=\"int4\"";
            }
            break;
        case Accept::data: break;
    }
    fail<TypeError>(op, name, " must be ", wanted, "; got ", got, hint);
}

bool Loan::is_capsule(nb::handle object) {
    return PyCapsule_IsValid(object.ptr(), kVersionedCapsule) ||
           PyCapsule_IsValid(object.ptr(), kUnversionedCapsule);
}

Loan::Loan(nb::handle capsule) {
    if (PyCapsule_IsValid(capsule.ptr(), kVersionedCapsule)) {
        versioned_ = static_cast<dlpack::ManagedTensorVersioned*>(
            PyCapsule_GetPointer(capsule.ptr(), kVersionedCapsule));
        PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    } else {
        unversioned_ =
            static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), kUnversionedCapsule));
        PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    }
}

Loan::Loan(Loan&& other) noexcept
    : versioned_(std::exchange(other.versioned_, nullptr)),
      unversioned_(std::exchange(other.unversioned_, nullptr)) {}

Loan::~Loan() {
    if (versioned_ && versioned_->deleter) versioned_->deleter(versioned_);
    if (unversioned_ && unversioned_->deleter) unversioned_->deleter(unversioned_);
}

nb::handle torch_dispatcher() {
    static PyObject* const object = nb::str("octavo.torch").release().ptr();
    return object;
}

Call::Call(const char* op, nb::handle stream) : op_(op), is_of_dispatcher_(stream.is(torch_dispatcher())) {
    if (!is_of_dispatcher_) wanted_stream_ = stream_argument(op, stream);
}

TensorView Call::input(const char* name, nb::handle array, Accept accept) {
    return import(name, array, accept, false);
}

std::optional<TensorView> Call::optional_input(const char* name, nb::handle array, Accept accept) {
    if (array.is_none()) return std::nullopt;
    return import(name, array, accept, false);
}

TensorView Call::output(const char* name, nb::handle array, Accept accept) {
    return import(name, array, accept, true);
}

TensorView Call::input_or_host(const char* name, nb::handle array, Accept accept) {
    return import(name, array, accept, false, true);
}

TensorView Call::output_or_host(const char* name, nb::handle array, Accept accept) {
    return import(name, array, accept, true, true);
}

TensorView Call::import(const char* name, nb::handle array, Accept accept, bool writes, bool may_be_on_host) {
    const bool is_list = PyList_Check(array.ptr()) || PyTuple_Check(array.ptr());
    const bool may_be_list = accept == Accept::integer && !writes;
    if (is_list && may_be_list && device_.value_or(Device{}).type == DeviceType::cpu)
        return import(name, array_of_list(name, array), accept, writes, may_be_on_host);
    const ArrayType type = array_type_of(array);
    if (type.framework == Framework::none) {
        const std::string type_name = bindings::type_name(array);
        if (is_jax_tracer(type_name)) {
            fail<TypeError>(op_, name, " is traced by JAX, as under jax.jit or jax.grad, and has no memory; ",
                            "use the functions of octavo.jax, which become part of the program; got ",
                            type_name);
        }
        fail<TypeError>(op_, name,
                        " must be an array (an object with __dlpack__ and __dlpack_device__); got ",
                        type_name);
    }
    if (type.is_masked) {
        fail<TypeError>(op_, name, " is a masked array, and its mask would be ignored; use ", name,
                        ".filled(...) or ", name, ".data");
    }
    if (is_of_dispatcher_ && type.has_torch_dispatch) {
        fail<TypeError>(op_, name, " (", bindings::type_name(array), ") must be an ordinary tensor here");
    }
    if (accept == Accept::words && has_bools(array, type))
        return import(name, words_of_bools(name, array), accept, writes, may_be_on_host);
    if (writes && type.framework == Framework::jax) {
        // Before jax 0.12 nothing in the exchange says that the memory must not be written.
        fail<TypeError>(op_, name, " is written to and cannot be a JAX array, which is immutable");
    }
    TensorView view;
    if (type.exchange && type.exchange->tensor_from_object) {
        dlpack::Tensor tensor;
        if (type.exchange->tensor_from_object(array.ptr(), &tensor)) {
            nb::python_error error;
            refuse(error, PyExc_TypeError, op_, name, array, accept);
        }
        view = to_view(op_, name, tensor, accept);
        enter_device(name, type, view.device, may_be_on_host);
    } else if (const std::optional<TensorView> by_attributes =
                   type.framework == Framework::cupy ? view_of_cupy(array) : std::nullopt) {
        view = *by_attributes;
        enter_device(name, type, view.device, may_be_on_host);
    } else {
        nb::object source = nb::borrow(array);
        // What ml_dtypes adds to NumPy is exported neither through DLPack nor as a buffer.
        const std::optional<DType> dtype =
            type.framework == Framework::numpy ? dtype_of(array) : std::nullopt;
        const bool by_view = dtype && is_of_ml_dtypes(*dtype);
        if (by_view) source = array.attr("view")(size_of(*dtype) == 2 ? "uint16" : "uint8");
        // Once the first array is on the CPU, the tensor itself will say whether this one is.
        const bool known = type.framework == Framework::numpy ||
                           (device_ && device_->type == DeviceType::cpu && !may_be_on_host);
        const Device device = known ? Device{} : device_of(op_, name, array, accept);
        Loan loan = borrow(name, source, type, enter_device(name, type, device, may_be_on_host), accept);
        if (!loan.is_known_version()) {
            fail<TypeError>(op_, name, " comes in a version of DLPack other than ", dlpack::kMajorVersion);
        }
        if (writes && loan.is_copy())
            fail<TypeError>(op_, name, " is written to, but was handed over as a copy");
        dlpack::Tensor tensor = loan.tensor();
        if (by_view) tensor.dtype = to_dlpack(*dtype);
        view = to_view(op_, name, tensor, accept);
        view.read_only = loan.is_read_only();
        if (view.device != device) refuse_device(name, view.device);
        if (loans_.empty()) loans_.reserve(kMostArrays);
        loans_.push_back(std::move(loan));
    }
    const bool has_integers = view.dtype == DType::int32 || view.dtype == DType::int64;
    if (type.framework == Framework::torch && !has_integers) {
        // torch's own __dlpack__ refuses a gradient and the negative bit, its exchange table does not; none
        // of them heeds tangents.
        refuse_gradient(op_, name, array);
        if (!has_tangents_) has_tangents_ = has_tangents();
        if (*has_tangents_) refuse_tangent(op_, name, array);
    }
    if (type.framework == Framework::torch && may_be_part(view)) refuse_negative_bit(op_, name, array);
    if (!may_be(view.dtype, accept)) refuse_dtype(op_, name, accept, to_string(view.dtype));
    if (view.dtype == DType::int64 && !writes && view.device.type == DeviceType::cpu)
        view = with_unit_stride(view);
    if (!first_array_.is_valid()) {
        first_array_ = array;
        first_type_ = type;
        first_view_ = view;
    }
    return view;
}

// What octavo.pack_tree_mask makes of them: on their own device, and on the stream of the work where the
// caller wants another one than their library's, whose memory would be used again too early.
nb::object Call::words_of_bools(const char* name, nb::handle bools) {
    nb::object stream = nb::none();
    if (wanted_stream_ && device_.value_or(Device{}).type == DeviceType::cuda)
        stream = nb::int_(reinterpret_cast<uintptr_t>(*wanted_stream_));
    try {
        const nb::module_ module = nb::module_::import_("octavo._tree_mask");
        made_.push_back(module.attr("words_of_bools")(op_, name, bools, stream));
    } catch (nb::python_error& error) {
        if (is_deleted(bools)) refuse(error, PyExc_RuntimeError, op_, name, bools, Accept::words);
        throw;
    }
    return made_.back();
}

void Call::refuse_device(const char* name, Device device) const {
    fail<DeviceError>(op_, "all arrays must be on one device; ", name, " is on ", to_string(device),
                      ", the first array on ", to_string(device_.value_or(Device{})));
}

// Settles on which stream we work, and that the array's own work comes before ours. Returns what
// __dlpack__(stream=) is to get.
std::optional<int64_t> Call::enter_device(const char* name, const ArrayType& type, Device device,
                                          bool may_be_on_host) {
    if (may_be_on_host && device.type == DeviceType::cpu) return std::nullopt;
    if (device_ && *device_ != device) refuse_device(name, device);
    const bool is_first = !device_;
    device_ = device;
    if (device.type == DeviceType::cpu) return std::nullopt;
    if (is_first) {
        require_cuda(op_);
        first_on_device_ = type;
        first_stream_ = type.current_stream(device);
        stream_ = wanted_stream_ ? *wanted_stream_ : first_stream_.value_or(nullptr);
    }
    const std::optional<void*> current =
        type.is_of_library_of(first_on_device_) ? first_stream_ : type.current_stream(device);
    // XLA may reuse an input's memory as soon as it is given back, and does not know our stream: with JAX
    // arrays the call returns when the work is done, which also makes the result ready.
    if (type.framework == Framework::jax) wait_for_work_ = true;
    if (current) {
        order_after(*current);
        return -1;  // nothing left for the producer to order
    }
    return stream_ ? reinterpret_cast<int64_t>(stream_)
                   : 1;  // 1: the legacy default stream; 0 is not allowed
}

// Asks the array for its tensor. `stream` is DLPack's number for the stream that the array must be ready on.
Loan Call::borrow(const char* name, nb::handle array, const ArrayType& type, std::optional<int64_t> stream,
                  Accept accept) const {
    nb::object capsule;
    try {
        if (type.exchange) {
            dlpack::ManagedTensorVersioned* tensor = nullptr;
            if (type.exchange->managed_tensor_from_object(array.ptr(), &tensor)) throw nb::python_error();
            return Loan(tensor);
        }
        // torch refuses tensors that require grad here, even where gradients are off.
        nb::object source = type.framework == Framework::torch ? array.attr("detach")() : nb::borrow(array);
        static PyObject* const method = PyUnicode_InternFromString("__dlpack__");
        static PyObject* const newest =
            nb::make_tuple(dlpack::kMajorVersion, dlpack::kMinorVersion).release().ptr();
        nb::object lend = source.attr(nb::handle(method));
        nb::dict options;
        if (stream) options["stream"] = *stream;
        try {
            if (type.framework == Framework::numpy) {  // runs no Python code
                capsule = lend(nb::arg("max_version") = nb::handle(newest));
            } else {
                options["max_version"] = nb::handle(newest);
                capsule = call_object(lend, nb::tuple(), options);
            }
        } catch (nb::python_error& error) {
            if (!error.matches(PyExc_TypeError)) throw;
            // A producer from before max_version (2023)?
            if (options.contains("max_version")) nb::del(options["max_version"]);
            capsule = call_object(lend, nb::tuple(), options);
        }
    } catch (nb::python_error& error) {
        const bool failed = error.matches(PyExc_RuntimeError) && !error.matches(PyExc_NotImplementedError);
        refuse(error, failed && !type.exchange ? PyExc_RuntimeError : PyExc_TypeError, op_, name, array,
               accept);
    }
    if (!Loan::is_capsule(capsule)) {
        fail<TypeError>(op_, name, ": __dlpack__ must return a DLPack capsule; got ",
                        bindings::type_name(capsule));
    }
    return Loan(capsule);
}

void Call::order_after(void* producer) {
    if (producer == stream_) return;
    if (std::find(producers_.begin(), producers_.end(), producer) == producers_.end())
        producers_.push_back(producer);
}

void Call::before_work() const {
    for (void* producer : producers_) cuda::order_streams(device_->index, producer, stream_);
}

void Call::after_work() const {
    if (wait_for_work_) {
        cuda::synchronize(device_->index, stream_);
    } else if (!wanted_stream_) {
        // Arrays of several frameworks: each goes on when we are done with its arrays.
        for (void* producer : producers_) cuda::order_streams(device_->index, stream_, producer);
    }
}

}  // namespace octavo::bindings
