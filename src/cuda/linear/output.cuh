// Turns sums into elements of the result.
#pragma once

#include "common/macros.h"
#include "cuda/linear/output.h"
#include "cuda/types.h"

#include <cmath>

namespace octavo::cuda {

namespace activation {

OCTAVO_HD float exp(float x) {
#ifdef __CUDA_ARCH__
    return __expf(x);
#else
    return std::exp(x);
#endif
}

OCTAVO_HD float divide(float x, float y) {
#ifdef __CUDA_ARCH__
    return __fdividef(x, y);  // zero from y = 2^126 on, which is beyond 1 + e^kMostExponent
#else
    return x / y;
#endif
}

#include "common/activation.inl"

}  // namespace activation

// Loads two neighbours of a row: the element at `at` and, if `both`, the next one.
template <class T>
__device__ __forceinline__ float2 load_pair(const void* base, int64_t at, bool in_pairs, bool both) {
    const T* const from = static_cast<const T*>(base) + at;
    if (in_pairs && both) return unpack<T>(*reinterpret_cast<const uint32_t*>(from));
    return {to_float(from[0]), both ? to_float(from[1]) : 0.0f};
}

// Writes element `column` and the next one of a row of the result, as far as they lie before `end`. `gate`:
// the sums of the rows of w that belong to them; `up`: those of w's other half, which only a gate has.
template <class T>
__device__ __forceinline__ void write_pair(const LinearOutput& p, int32_t row, int32_t column, int32_t end,
                                           float2 gate, float2 up) {
    if (row >= p.num_rows || column >= end) return;
    const bool both = column + 1 < end;
    if (p.bias) {
        const float2 bias = load_pair<T>(p.bias, column, p.in_pairs, both);
        gate.x += bias.x, gate.y += bias.y;
    }
    if (p.activation == LinearActivation::silu || p.is_gated()) {
        gate = {activation::silu(gate.x), activation::silu(gate.y)};
    } else if (p.activation == LinearActivation::gelu) {
        gate = {activation::gelu(gate.x), activation::gelu(gate.y)};
    }
    if (p.is_gated()) {
        if (p.bias) {
            const float2 bias = load_pair<T>(p.bias, int64_t{p.width} + column, p.in_pairs, both);
            up.x += bias.x, up.y += bias.y;
        }
        gate.x *= up.x, gate.y *= up.y;
    }
    if (p.residual) {
        const float2 residual = load_pair<T>(p.residual, row * p.residual_stride + column, p.in_pairs, both);
        gate.x += residual.x, gate.y += residual.y;
    }
    T* const out = static_cast<T*>(p.out) + row * p.out_stride + column;
    if (p.in_pairs && both) {
        *reinterpret_cast<uint32_t*>(out) = pack<T>(gate.x, gate.y);
    } else {
        out[0] = from_float<T>(gate.x);
        if (both) out[1] = from_float<T>(gate.y);
    }
}

}  // namespace octavo::cuda
