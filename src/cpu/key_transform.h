// Rows of keys and of queries as a cache of transformed keys needs them.
#pragma once

#include "cpu/half.h"
#include "params/key_transform.h"

#include <cstdint>

namespace octavo::cpu {

enum class KeyTransformSide : uint8_t { key, query };

// One row of head_dim numbers, to float32.
template <class T>
void transform_row(const KeyTransform& transform, const T* from, int32_t head_dim, int64_t kv_head,
                   KeyTransformSide side, float* to) {
    for (int32_t d = 0; d < head_dim; ++d) {
        const float x = to_float(from[d]);
        to[d] = side == KeyTransformSide::key ? transform.of_key(x, kv_head, d)
                                              : transform.of_query(x, kv_head, d);
    }
    if (transform.rotates) hadamard_rotate(to, head_dim);
}

}  // namespace octavo::cpu
