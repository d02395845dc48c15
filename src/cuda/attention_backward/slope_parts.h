// Where CTAs leave their parts of the gradients of ALiBi's slopes.
#pragma once

#include "params/attention_backward_params.h"

#include <cstdint>

namespace octavo::cuda {

struct SlopeParts {
    float* parts;    // [num_q_heads, batch, stride]; null where no gradients of slopes are asked for
    int32_t stride;  // the number of parts of the longest sequence

    OCTAVO_HD float* of(const AttentionBackwardParams& p, int32_t head, int32_t batch) const {
        return parts + (int64_t{head} * p.batch + batch) * stride;
    }
    static int64_t bytes(const AttentionBackwardParams& p, int32_t stride) {
        return p.dalibi_slopes ? int64_t{p.num_q_heads} * p.batch * stride * int64_t{sizeof(float)} : 0;
    }
};

}  // namespace octavo::cuda
