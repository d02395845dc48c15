// A linear layer that normalises its x, in two steps: rms_norm to another array, and a linear layer of that.
#pragma once

#include "params/linear_params.h"
#include "params/rms_norm_params.h"

#include <cstdint>

namespace octavo {

constexpr int kMaxNormAxes = 3;  // leading axes of rms_norm, of which RmsNormParams has that many

// The normalised rows of x, one behind the other, in an array of x's dtype. `row_stride` counts elements.
struct NormalisedRows {
    void* data;
    int64_t row_stride;
};

// The leading axes of x, joined wherever x itself has no gaps between them. Those of LinearParams may be
// more, since out and residual have them, too.
struct NormAxes {
    int32_t count;
    int64_t lengths[TensorView::kMaxDims - 1], strides[TensorView::kMaxDims - 1];

    static NormAxes of(const LinearParams& p) {
        NormAxes axes{};
        for (int axis = 0; axis < p.num_axes; ++axis) {
            const int64_t length = p.axes[axis], stride = p.x_rows.strides[axis];
            const bool continues = axes.count > 0 && axes.strides[axes.count - 1] == length * stride;
            if (!continues) axes.lengths[axes.count++] = 1;
            axes.lengths[axes.count - 1] *= length;
            axes.strides[axes.count - 1] = stride;
        }
        return axes;
    }
};

// For at most kMaxNormAxes of NormAxes.
inline RmsNormParams norm_of(const LinearParams& p, const NormalisedRows& to) {
    RmsNormParams norm{};
    norm.dtype = p.dtype;
    norm.weight_dtype = p.norm_weight_dtype;
    norm.device = p.device;
    norm.dim = static_cast<int32_t>(p.depth);
    norm.eps = p.norm_eps;
    norm.x = p.x;
    norm.weight = p.norm_weight;
    norm.out = to.data;
    const NormAxes axes = NormAxes::of(p);
    int64_t stride = to.row_stride;
    for (int i = kMaxNormAxes - 1, axis = axes.count - 1; i >= 0; --i, --axis) {
        norm.shape[i] = axis >= 0 ? axes.lengths[axis] : 1;
        norm.x_strides[i] = axis >= 0 ? axes.strides[axis] : 0;
        norm.out_strides[i] = stride;
        stride *= norm.shape[i];
    }
    return norm;
}

inline LinearParams behind_norm(const LinearParams& p, const NormalisedRows& rows) {
    LinearParams behind = p;
    behind.norm_weight = nullptr;
    behind.x = rows.data;
    int64_t stride = rows.row_stride;
    for (int axis = p.num_axes - 1; axis >= 0; --axis) {
        behind.x_rows.strides[axis] = stride;
        stride *= p.axes[axis];
    }
    return behind;
}

}  // namespace octavo
