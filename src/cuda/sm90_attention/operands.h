// The arrays of a call as the copy engine is to see them: Sm90Launch, in parameters.h, says what for.
#pragma once

#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// Whether the copy engine can step over an axis of this stride, in elements.
bool is_movable_stride(int64_t stride, DType dtype);

// One array: [outer, token, head, column]. Strides count elements.
struct Sm90Operand {
    const void* base;
    int64_t outer_stride, token_stride, head_stride;
    int32_t num_heads;
    int32_t edge;  // in tokens: see Sm90Launch

    // Whether the copy engine can move its rows.
    bool is_movable(DType dtype) const;
};

struct Sm90Operands {
    Sm90Operand q, out, k, v;

    explicit Sm90Operands(const AttentionParams& params);
};

}  // namespace octavo::cuda
