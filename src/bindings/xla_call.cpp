#include "bindings/xla_call.h"

#include "bindings/scalars.h"
#include "common/fail.h"

#include <algorithm>

namespace octavo::bindings {
namespace {

constexpr const char* kArraysAttribute = "arrays";

std::string dtype_name(int32_t dtype) {
    switch (dtype) {
        case xla::kF32: return to_string(DType::float32);
        case xla::kF16: return to_string(DType::float16);
        case xla::kBf16: return to_string(DType::bfloat16);
        case xla::kS32: return to_string(DType::int32);
        case xla::kS64: return to_string(DType::int64);
        case xla::kU32: return "uint32";
        case xla::kU64: return "uint64";
        case xla::kPred: return "bool";
        case xla::kU8: return to_string(DType::uint8);
        case xla::kS8: return to_string(DType::int8);
        case xla::kF8E4m3fn: return to_string(DType::float8_e4m3fn);
        case xla::kF8E5m2: return to_string(DType::float8_e5m2);
    }
    return "XLA type " + std::to_string(dtype);
}

// Sets shape and strides of an array in C order.
void set_shape(const char* op, std::string_view name, TensorView& view, const int64_t* shape, int64_t ndim) {
    if (ndim > TensorView::kMaxDims) {
        fail<ValueError>(op, name, " must have at most ", TensorView::kMaxDims, " axes; got ", ndim);
    }
    view.ndim = static_cast<int32_t>(ndim);
    int64_t stride = 1;
    for (int32_t axis = view.ndim - 1; axis >= 0; --axis) {
        view.shape[axis] = shape[axis];
        view.strides[axis] = stride;
        stride *= shape[axis];
    }
}

std::string_view text_of(const xla::Text& text) { return {text.data, text.size}; }

// Takes the first word off a text.
std::string_view next_word(std::string_view& text) {
    const size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return word;
}

}  // namespace

XlaCall::XlaCall(const char* op, const xla::CallFrame& frame, Device device) : op_(op) {
    std::string_view names;
    options_.reserve(frame.attributes.size);
    for (int64_t i = 0; i < frame.attributes.size; ++i) {
        const std::string_view name = text_of(*frame.attributes.names[i]);
        const void* value = frame.attributes.values[i];
        if (frame.attributes.kinds[i] == xla::kTextAttribute && name == kArraysAttribute) {
            names = text_of(*static_cast<const xla::Text*>(value));
            continue;
        }
        if (frame.attributes.kinds[i] == xla::kTextAttribute) {
            options_.push_back({name, text_of(*static_cast<const xla::Text*>(value))});
            continue;
        }
        if (frame.attributes.kinds[i] != xla::kScalarAttribute)
            fail<TypeError>(op_, name, " must be a scalar or text attribute");
        const auto& scalar = *static_cast<const xla::Scalar*>(value);
        switch (scalar.dtype) {
            case xla::kPred: options_.push_back({name, *static_cast<const bool*>(scalar.value)}); break;
            case xla::kS64: options_.push_back({name, *static_cast<const int64_t*>(scalar.value)}); break;
            case xla::kF64: options_.push_back({name, *static_cast<const double*>(scalar.value)}); break;
            default: fail<TypeError>(op_, name, " must be a bool, int64 or float64 attribute");
        }
    }
    arrays_.reserve(frame.arguments.size + frame.results.size);
    for (const xla::Arrays* group : {&frame.arguments, &frame.results}) {
        for (int64_t i = 0; i < group->size; ++i) {
            const auto& buffer = *static_cast<const xla::Buffer*>(group->values[i]);
            Array array{next_word(names), dtype_name(buffer.dtype), {}};
            array.view.data = buffer.data;
            array.view.device = device;
            set_shape(op_, array.name, array.view, buffer.shape, buffer.ndim);
            add(std::move(array), group == &frame.results);
        }
    }
}

XlaCall::XlaCall(const char* op, nb::handle arrays, nb::dict options) : op_(op) {
    uintptr_t address = 1 << 12;  // distinct, so that no array seems to overlap another
    for (nb::handle item : arrays) {
        Array array{nb::borrow<nb::str>(item[0]).c_str(), nb::borrow<nb::str>(item[1]).c_str(), {}};
        std::vector<int64_t> shape;
        for (nb::handle length : nb::object(item[2])) shape.push_back(nb::cast<int64_t>(length));
        array.view.data = reinterpret_cast<void*>(address);
        array.view.device = {DeviceType::meta, 0};
        set_shape(op_, array.name, array.view, shape.data(), static_cast<int64_t>(shape.size()));
        address += 8 * array.view.size() + 256;
        add(std::move(array), false);
    }
    for (auto [key, value] : options) {
        const std::string_view name = nb::borrow<nb::str>(key).c_str();
        if (PyBool_Check(value.ptr())) {
            options_.push_back({name, value.ptr() == Py_True});
        } else if (PyUnicode_Check(value.ptr())) {
            options_.push_back({name, str_argument(op_, name.data(), value)});  // which lives in `options`
        } else if (PyLong_Check(value.ptr())) {
            options_.push_back({name, int_argument(op_, name.data(), value)});
        } else {
            options_.push_back({name, float_argument(op_, name.data(), value)});
        }
    }
}

void XlaCall::add(Array array, bool is_result) {
    if (const Array* argument = is_result ? find(array.name) : nullptr) {
        if (argument->view.data == array.view.data || array.view.size() == 0) return;
        fail<ValueError>(op_, array.name, " must be aliased with the result that replaces it");
    }
    if (const auto dtype = dtype_named(array.dtype, Accept::data)) array.view.dtype = *dtype;
    arrays_.push_back(std::move(array));
}

const XlaCall::Array* XlaCall::find(std::string_view name) const {
    const auto found =
        std::find_if(arrays_.begin(), arrays_.end(), [&](const Array& array) { return array.name == name; });
    return found != arrays_.end() ? &*found : nullptr;
}

std::optional<TensorView> XlaCall::optional_array(const char* name, Accept accept) const {
    const Array* array = find(name);
    if (!array) return std::nullopt;
    const std::optional<DType> dtype = dtype_named(array->dtype, accept);
    if (!dtype || !may_be(*dtype, accept)) refuse_dtype(op_, name, accept, array->dtype);
    TensorView view = array->view;
    view.dtype = *dtype;
    return view;
}

TensorView XlaCall::array(const char* name, Accept accept) const {
    const std::optional<TensorView> view = optional_array(name, accept);
    if (!view) fail<TypeError>(op_, name, " is missing");
    return *view;
}

}  // namespace octavo::bindings
