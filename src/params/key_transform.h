// The transformation of keys before they become codes, and of queries, so that scores stay what they were.
// For a key k and a query q of one KV head:
//
//   stored key   k' = H ((k - offset) / scale)
//   its query    q' = H (q * scale)
//   q . k = q' . k' + q . offset
//
// with the rotation H of common/hadamard.h, or without it. The last term is the same for all keys of a query,
// so that it changes the log-sum-exp but not the softmax. KIVI (Liu et al. 2024, arXiv:2402.02750) found that
// keys need an offset and a scale for each channel, and that values do not.
#pragma once

#include "common/hadamard.h"

#include <cmath>
#include <cstdint>

namespace octavo {

struct KeyTransform {
    const float* offset;  // [num_kv_heads, head_dim]; null: zeros
    const float* scale;   // [num_kv_heads, head_dim]; null: ones
    int64_t offset_head_stride, scale_head_stride;
    bool rotates;

    OCTAVO_HD bool is_identity() const { return !offset && !scale && !rotates; }
    OCTAVO_HD float offset_at(int64_t kv_head, int32_t dim) const {
        return offset[kv_head * offset_head_stride + dim];
    }
    OCTAVO_HD float scale_at(int64_t kv_head, int32_t dim) const {
        return scale[kv_head * scale_head_stride + dim];
    }

    // Transforms one number of a key, or of a query, up to the rotation.
    OCTAVO_HD float of_key(float x, int64_t kv_head, int32_t dim) const {
        if (offset) x = rounded_difference(x, offset_at(kv_head, dim));
        if (scale) x = rounded_product(x, rounded_quotient(1.0f, scale_at(kv_head, dim)));
        return x;
    }
    OCTAVO_HD float of_query(float x, int64_t kv_head, int32_t dim) const {
        return scale ? rounded_product(x, scale_at(kv_head, dim)) : x;
    }

    // Adds q . offset, scaled, to the log-sum-exp of a row. One that sees no key lacks nothing, whatever its
    // query holds.
    OCTAVO_HD static float of_lse(float lse, float shift) { return lse == -INFINITY ? lse : lse + shift; }
};

}  // namespace octavo
