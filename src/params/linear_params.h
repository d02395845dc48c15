// A product with weights, checked: plain data for both backends. Strides count elements; the last axis of
// every array has stride 1.
#pragma once

#include <octavo/linear.h>

#include <cstdint>
#include <optional>

namespace octavo {

// Rows of an array [..., length] by their number, in C order.
struct LinearRows {
    int64_t strides[TensorView::kMaxDims - 1];  // strides of the leading axes
};

struct LinearParams {
    DType dtype;    // the dtype of x, bias, residual and out
    DType w_dtype;  // the same; with float32 it may also be one of 16 bits
    Device device;
    std::optional<Activation> activation;
    bool static_weight, batch_invariant;
    std::optional<LinearPlan> plan;          // the caller's, for this dtype
    int64_t num_rows;                        // M, over all leading axes of x
    int64_t width;                           // columns of out: N, or F
    int64_t depth;                           // K
    int32_t num_axes;                        // leading axes; those without gaps between them count as one
    int64_t axes[TensorView::kMaxDims - 1];  // their lengths
    const void* x;                           // [axes..., depth]
    const void* w;                           // [w_rows(), depth]
    const void* bias;                        // [w_rows()], or null
    const void* residual;                    // [axes..., width], or null
    const void* norm_weight;                 // [depth], or null: x is taken as it is
    DType norm_weight_dtype;                 // dtype, or float32
    float norm_eps;
    void* out;  // [axes..., width]
    int64_t w_stride;
    LinearRows x_rows, residual_rows, out_rows;

    bool is_gated() const { return activation == Activation::silu_gate; }
    int64_t w_rows() const { return is_gated() ? 2 * width : width; }

    // How many elements lie from the first row to this one.
    int64_t offset_of(const LinearRows& rows, int64_t row) const {
        int64_t offset = 0;
        for (int axis = num_axes - 1; axis > 0; --axis) {
            offset += row % axes[axis] * rows.strides[axis];
            row /= axes[axis];
        }
        return num_axes == 0 ? 0 : offset + row * rows.strides[0];
    }
};

}  // namespace octavo
