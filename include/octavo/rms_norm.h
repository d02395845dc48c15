// RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), with the sum of a residual stream before it.
#pragma once

#include <octavo/error.h>
#include <octavo/tensor.h>

#include <optional>

namespace octavo {

// out = x / sqrt(mean(x^2) + eps) * weight over the last axis of x [..., dim], which has at most three other
// axes. With a residual, x + residual, rounded to their dtype, takes the place of x, and is written to
// residual_out. Sums are float32, and results are rounded once.
struct RmsNormArgs {
    TensorView x;       // float32, float16 or bfloat16; so are residual and both results, like x
    TensorView weight;  // [dim], of x's dtype or float32
    double eps = 1e-6;
    std::optional<TensorView> residual;
    TensorView out;
    std::optional<TensorView> residual_out;  // given if residual is
    // Each result is either exactly x or residual (same address and strides), or memory that overlaps
    // neither. The two results share no element, and do not overlap the weight.
    void* stream = nullptr;  // cudaStream_t; ignored on the CPU
};

void rms_norm(const RmsNormArgs& args);

}  // namespace octavo
