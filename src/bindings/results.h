// What the results of an operator look like, from the arguments that they are like.
#pragma once

#include <octavo/tensor.h>

#include <algorithm>
#include <optional>

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

}  // namespace octavo::bindings
