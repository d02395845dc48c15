// The gradients of attention, checked: plain data for both backends. Strides count elements; the last axis
// has stride 1 throughout.
#pragma once

#include "params/attention_params.h"

#include <cstdint>

namespace octavo {

// The strides of an array like q, or like k. Packed arrays have no batch axis; their batch stride is 0.
struct GradientStrides {
    int64_t batch, token, head;
};

// The parameters of the forward call, whose results `out` and `lse` are read here, and the gradients.
struct AttentionBackwardParams : AttentionParams {
    const void* dout;  // like out
    GradientStrides dout_strides;
    const float* dlse;  // like lse; null: zeros
    GradientStrides dlse_strides;
    void* dq;  // like q; written
    GradientStrides dq_strides;
    void* dk;  // like k; written
    GradientStrides dk_strides;
    void* dv;  // like v; written
    GradientStrides dv_strides;
    float* dalibi_slopes;         // like alibi_slopes, in C order; written; may be null
    float* dsinks;                // like sinks; written; may be null
    bool deterministic;           // whether the bits must be the same every time
    int64_t dalibi_batch_stride;  // num_q_heads; 0: the batch shares its slopes, whose gradients are summed
};

}  // namespace octavo
