// What the results of an operator look like, from the arguments that they are like.
#pragma once

#include "operators/schema.h"
#include "params/index_array.h"

#include <octavo/tensor.h>

#include <algorithm>
#include <cstring>
#include <limits>
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

// In C order, without data. `result` is an argument in operators/schema.h.
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
    std::is_same_v<Operator, schema::Attention> || std::is_same_v<Operator, schema::PagedAttention>;

// Of attention, where the operator leaves the rows past the last packed query as they are: in a result that
// nobody else has written to they become zeros, and -inf in the log-sum-exp. On the CPU, after the operator;
// in C order.
template <class Args>
void clear_padding(const Args& args, const TensorView& result) {
    if (!args.cu_seqlens_q || result.device.type != DeviceType::cpu || result.size() == 0) return;
    const TensorView& cu_seqlens = *args.cu_seqlens_q;
    const int64_t num_queries = IndexArray::of(cu_seqlens)[cu_seqlens.shape[0] - 1];
    const int64_t row_size = result.size() / result.shape[0], begin = num_queries * row_size;
    if (args.lse && result.data == args.lse->data) {
        float* const lse = static_cast<float*>(result.data);
        std::fill(lse + begin, lse + result.size(), -std::numeric_limits<float>::infinity());
    } else {
        const int64_t bytes = size_of(result.dtype);
        std::memset(static_cast<char*>(result.data) + begin * bytes, 0, (result.size() - begin) * bytes);
    }
}

}  // namespace octavo::bindings
