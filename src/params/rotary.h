// The rotary embedding of positions (RoFormer, Su et al. 2021, arXiv:2104.09864), which append_kv applies to
// new keys and to queries. Pair i of a head's numbers (a, b), at position t, becomes
//
//   (a cos[t, i] - b sin[t, i], b cos[t, i] + a sin[t, i])
//
// in float32, every product and sum rounded, so that all backends agree in every bit.
#pragma once

#include "common/rounded.h"

#include <octavo/tensor.h>

#include <cstdint>

namespace octavo {

struct Rotary {
    DType dtype;      // the dtype of both tables: that of the keys, or float32
    const void* cos;  // [max_positions, dim / 2]
    const void* sin;
    int64_t cos_stride, sin_stride;  // from a position to the next
    int32_t max_positions;
    int32_t dim;       // even; the numbers of a head from here on stay as they are; 0: all of them do
    bool interleaved;  // pair i is the numbers 2 i and 2 i + 1, otherwise i and i + dim / 2

    // The pair of number d, which must be below dim.
    OCTAVO_HD int32_t pair_of(int32_t d) const {
        return interleaved ? d / 2 : d - (is_second(d) ? dim / 2 : 0);
    }
    OCTAVO_HD bool is_second(int32_t d) const { return interleaved ? d % 2 == 1 : d >= dim / 2; }
    OCTAVO_HD int32_t partner_of(int32_t d) const { return is_second(d) ? d - distance() : d + distance(); }

    OCTAVO_HD int32_t first_of(int32_t pair) const { return interleaved ? 2 * pair : pair; }
    OCTAVO_HD int32_t distance() const { return interleaved ? 1 : dim / 2; }  // between the two of a pair
};

OCTAVO_HD float rotated_first(float first, float second, float cos, float sin) {
    return rounded_difference(rounded_product(first, cos), rounded_product(second, sin));
}
OCTAVO_HD float rotated_second(float first, float second, float cos, float sin) {
    return rounded_sum(rounded_product(second, cos), rounded_product(first, sin));
}

}  // namespace octavo
