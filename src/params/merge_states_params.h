// The merge of two partial results, checked: plain data for both backends. Strides count elements;
// head_dim has stride 1.
#pragma once

#include <octavo/tensor.h>

#include <cstdint>

namespace octavo {

// Every array has the leading axes `shape`, each with its own strides; shorter shapes are padded with ones.
struct MergeStatesParams {
    DType dtype;  // the dtype of out_a, out_b and out
    Device device;
    int64_t shape[3];
    int32_t head_dim;
    const void* out_a;   // [shape..., head_dim]; likewise out_b and out
    const float* lse_a;  // [shape...]; likewise lse_b and lse
    const void* out_b;
    const float* lse_b;
    void* out;
    float* lse;
    int64_t out_a_strides[3], lse_a_strides[3];
    int64_t out_b_strides[3], lse_b_strides[3];
    int64_t out_strides[3], lse_strides[3];
};

}  // namespace octavo
