// What the results of an operator look like, from the arguments that they are like.
#pragma once

#include "cpu/backend.h"
#include "cuda/backend.h"
#include "operators/schema.h"
#include "params/index_array.h"
#include "params/padding.h"

#include <octavo/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace octavo::bindings {

inline void set_c_order(TensorView& view) {
    int64_t stride = 1;
    for (int axis = view.ndim - 1; axis >= 0; --axis) {
        view.strides[axis] = stride;
        stride *= view.shape[axis];
    }
}

inline const TensorView& array_or_none(const TensorView& array) { return array; }

// Stands for an array that is not given by one without elements: the operator's check says what is missing.
inline TensorView array_or_none(const std::optional<TensorView>& array) {
    return array ? *array : TensorView(nullptr, DType::float32, {0});
}

inline bool is_given(const TensorView&) { return true; }
inline bool is_given(const std::optional<TensorView>& array) { return array.has_value(); }

// Makes a view in C order, without data. `result` is an argument in operators/schema.h.
template <class Argument, class Args>
TensorView shape_of_result(const Argument& result, const Args& args) {
    TensorView view = array_or_none(args.*result.like);
    view.data = nullptr;
    view.read_only = false;
    if (result.one_a_row) {
        view.dtype = DType::float32;
        view.ndim = std::max(view.ndim - 1, 0);
        std::fill(view.shape.begin() + view.ndim, view.shape.end(), 0);
    }
    if (result.width && view.ndim > 0) view.shape[view.ndim - 1] = result.width(args);
    set_c_order(view);
    return view;
}

// Whether rows of the results may be padding that the operator does not write.
template <class Operator>
constexpr bool kLeavesPadding =
    std::is_same_v<Operator, schema::Attention> || std::is_same_v<Operator, schema::PagedAttention> ||
    std::is_same_v<Operator, schema::LatentAttention>;

// Adds the padding of a result of attention, which leaves rows past the last packed query as they are. In a
// result that nobody else has written to they become zeros, and -inf in the log-sum-exp. `result`, in C
// order, is args.out or args.lse.
template <class Args>
void add_padding(const Args& args, const TensorView& result, Padding& padding) {
    if (!args.cu_seqlens_q || result.size() == 0) return;
    const bool is_lse = args.lse && result.data == args.lse->data;
    const int64_t row_bytes = result.size() / result.shape[0] * size_of(result.dtype);
    constexpr uint32_t kMinusInfinity = 0xff800000;
    PaddedArray array{};
    array.data = result.data;
    array.total = result.shape[0];
    array.num_heads = static_cast<int32_t>(result.shape[1]);
    array.token_stride = row_bytes;
    array.head_stride = row_bytes / array.num_heads;
    array.head_bytes = static_cast<int32_t>(array.head_stride);
    array.word = is_lse ? kMinusInfinity : 0;
    array.cu_seqlens = IndexArray::of(*args.cu_seqlens_q);
    array.batch = static_cast<int32_t>(args.cu_seqlens_q->shape[0] - 1);
    padding.add(array);
}

// Clears the padding, on a GPU by a launch behind those of the operator, unless there is nothing to clear.
inline void clear_padding(const Padding& padding, Device device, void* stream) {
    if (device.type == DeviceType::cpu)
        cpu::clear_padding(padding);
    else
        cuda::clear_padding(padding, device.index, stream);
}

}  // namespace octavo::bindings
