#include <octavo/linear.h>
#include <octavo/tensor.h>

#include <octavo/error.h>

#include <limits>

namespace octavo {
namespace {

std::string text_of(const int64_t* numbers, int count) {
    std::string text = "[";
    for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
    return text + "]";
}

}  // namespace

std::string to_string(DType dtype) {
    switch (dtype) {
        case DType::float32: return "float32";
        case DType::float16: return "float16";
        case DType::bfloat16: return "bfloat16";
        case DType::int32: return "int32";
        case DType::int8: return "int8";
        case DType::float8_e4m3fn: return "float8_e4m3fn";
        case DType::float8_e5m2: return "float8_e5m2";
        case DType::uint8: return "uint8";
        case DType::int4: return "int4";
        case DType::int64: return "int64";
    }
    return "unknown dtype";
}

std::string to_string(Activation activation) {
    switch (activation) {
        case Activation::silu: return "silu";
        case Activation::gelu: return "gelu";
        case Activation::silu_gate: return "silu_gate";
    }
    return "unknown activation";
}

std::string to_string(Device device) {
    switch (device.type) {
        case DeviceType::cpu: return "cpu";
        case DeviceType::cuda: return "cuda:" + std::to_string(device.index);
        case DeviceType::meta: return "meta";
    }
    return "unknown device";
}

TensorView::TensorView(void* data, DType dtype, std::initializer_list<int64_t> extents, Device device)
    : data(data), dtype(dtype), device(device), ndim(static_cast<int32_t>(extents.size())) {
    if (extents.size() > kMaxDims) {
        throw ValueError("TensorView: at most " + std::to_string(kMaxDims) + " axes, got " +
                         std::to_string(extents.size()));
    }
    int axis = 0;
    for (int64_t extent : extents) shape[axis++] = extent;
    int64_t stride = 1;
    for (axis = ndim - 1; axis >= 0; --axis) {
        strides[axis] = stride;
        if (__builtin_mul_overflow(stride, shape[axis], &stride))
            throw ValueError("TensorView: shape " + shape_string() + " must have fewer than 2^63 elements");
    }
}

int64_t TensorView::size() const {
    int64_t count = 1;
    bool is_too_large = false;
    for (int axis = 0; axis < ndim; ++axis) {
        if (shape[axis] == 0) return 0;
        is_too_large |= __builtin_mul_overflow(count, shape[axis], &count);
    }
    return is_too_large ? std::numeric_limits<int64_t>::max() : count;
}

std::string TensorView::shape_string() const { return text_of(shape.data(), ndim); }

std::string TensorView::strides_string() const { return text_of(strides.data(), ndim); }

}  // namespace octavo
