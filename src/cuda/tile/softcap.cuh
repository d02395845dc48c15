// The softcap of a tile of scores. Most scores lie far from the cap, where tanh is a polynomial: exponentials
// and quotients, of which the softmax needs one a score already, would take three times as long.
#pragma once

#include "common/score.h"

#include <cmath>
#include <cstdint>

namespace octavo::cuda {

// The largest magnitude of these numbers. As bits, positive numbers have the order of signed integers, and
// negative ones, behind all positive ones, that of unsigned integers; maxima of three integers take a quarter
// of the time of maxima of numbers.
template <int kCount>
__device__ __forceinline__ float largest_magnitude(const float (&numbers)[kCount]) {
    static_assert(kCount % 2 == 0);
    int32_t positive = 0;
    uint32_t negative = 0;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
        positive = __vimax3_s32(positive, __float_as_int(numbers[i]), __float_as_int(numbers[i + 1]));
        negative = __vimax3_u32(negative, __float_as_uint(numbers[i]), __float_as_uint(numbers[i + 1]));
    }
    return fmaxf(__int_as_float(positive), fabsf(__uint_as_float(negative)));
}

// Turns dot products, some of which this warp holds, into capped scores in units of log2(e). `is_small`:
// whether those before were far from the cap, in a sequence of tiles that begins with true. Where one was
// not, no later one is looked at.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&scores)[kCount], const ScoreTransform& transform,
                                           bool& is_small) {
    if (is_small) {
        const float largest = largest_magnitude(scores) * fabsf(transform.inner);
        is_small = !__any_sync(~0u, !(largest <= ScoreTransform::kSmall));
    }
    if (is_small) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            scores[i] = transform.outer * ScoreTransform::tanh_of_small(scores[i] * transform.inner);
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) scores[i] = transform(scores[i]);
    }
}

}  // namespace octavo::cuda
