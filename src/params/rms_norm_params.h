// A call of rms_norm, checked: plain data for both backends. Strides count elements; dim has stride 1.
#pragma once

#include "common/macros.h"

#include <octavo/tensor.h>

#include <cstdint>

namespace octavo {

// Every array but the weight has the leading axes `shape`, each with its own strides. Axes without gaps
// between them in all of these arrays are joined into one; shorter shapes begin with ones.
struct RmsNormParams {
    DType dtype;         // the dtype of x, residual, out and residual_out
    DType weight_dtype;  // the same, or float32
    Device device;
    int64_t shape[3];
    int32_t dim;
    float eps;
    const void* x;         // [shape..., dim]; likewise residual, out and residual_out
    const void* residual;  // null: none, and no residual_out
    const void* weight;    // [dim]
    void* out;
    void* residual_out;
    int64_t x_strides[3], residual_strides[3], out_strides[3], residual_out_strides[3];

    OCTAVO_HD int64_t num_rows() const { return shape[0] * shape[1] * shape[2]; }
};

}  // namespace octavo
