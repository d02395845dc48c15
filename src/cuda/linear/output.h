// How the sums of a product with weights become the result.
#pragma once

#include "common/macros.h"
#include "params/linear_params.h"

#include <cstdint>

namespace octavo::cuda {

enum class LinearActivation : int8_t { none, silu, gelu, silu_gate };

// The arrays that the result is made of. Rows of residual and out are a stride apart.
struct LinearOutput {
    const void* bias;      // or null
    const void* residual;  // or null
    void* out;
    int64_t residual_stride, out_stride;
    int32_t num_rows, width;
    LinearActivation activation;
    bool in_pairs;  // whether two neighbours of a row of residual and out, and of bias, can move at once

    // Whether the sums are the result, written in pairs.
    OCTAVO_HD bool is_plain() const {
        return !bias && !residual && activation == LinearActivation::none && in_pairs;
    }
    OCTAVO_HD bool is_gated() const { return activation == LinearActivation::silu_gate; }
    // Whether a gate, or a residual, is all that is done to the sums.
    OCTAVO_HD bool is_gate_alone() const { return !bias && !residual && is_gated(); }
    OCTAVO_HD bool is_residual_alone() const {
        return !bias && residual && activation == LinearActivation::none;
    }
};

LinearOutput output_of(const LinearParams& params);

}  // namespace octavo::cuda
