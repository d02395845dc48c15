// Queries of bfloat16 over codes of fp8: products are in float16, which has all numbers of fp8.
#pragma once

#include "common/float_bits.h"
#include "cuda/types.h"

#include <cstdint>

namespace octavo::cuda {

// Rounds a row of bfloat16, which kLanes lanes share, to float16, divided by a power of two that brings its
// largest element near 2^10. Returns this power.
template <int kLanes, int kChunks>
__device__ float round_to_float16(uint4 (&chunks)[kChunks]) {
    auto for_each_word = [&](auto f) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) f(chunks[i].x), f(chunks[i].y), f(chunks[i].z), f(chunks[i].w);
    };
    float largest = 0.0f;
    for_each_word([&](uint32_t word) {
        const float2 pair = unpack<bfloat16>(word);
        largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    });
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    constexpr int32_t kLeastExponent = -40;  // of rows below it, zeros among them
    const int32_t exponent = max(static_cast<int32_t>(__float_as_uint(largest) >> 23) - 127, kLeastExponent);
    const float factor = power_of_two(10 - exponent);
    for_each_word([&](uint32_t& word) {
        const float2 pair = unpack<bfloat16>(word);
        word = pack<float16>(pair.x * factor, pair.y * factor);
    });
    return power_of_two(exponent - 10);
}

}  // namespace octavo::cuda
