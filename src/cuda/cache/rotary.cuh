// The rotary embedding on the device.
#pragma once

#include "cuda/columns.cuh"
#include "cuda/row_in_registers.cuh"
#include "cuda/types.h"
#include "params/rotary.h"

#include <cmath>
#include <cstdint>

namespace octavo::cuda {

// Loads kWide neighbours, from `pair` on, of one row of a table of T or of float32, as float32. Past the end
// of the table they are NaN: nothing has checked the lengths, and a reader of such a key or query has to
// notice.
template <class T, int kWide>
__device__ __forceinline__ Columns<float, kWide> load_angles(const Rotary& rotary, const void* table,
                                                             int64_t stride, int32_t position, int32_t pair) {
    Columns<float, kWide> angles;
    if (position >= rotary.max_positions) {
#pragma unroll
        for (int c = 0; c < kWide; ++c) angles.at[c] = NAN;
        return angles;
    }
    const int64_t offset = position * stride + pair;
    if (rotary.dtype == DType::float32)
        return *reinterpret_cast<const Columns<float, kWide>*>(static_cast<const float*>(table) + offset);
    const auto stored = *reinterpret_cast<const Columns<T, kWide>*>(static_cast<const T*>(table) + offset);
#pragma unroll
    for (int c = 0; c < kWide; ++c) angles.at[c] = to_float(stored.at[c]);
    return angles;
}

template <class T, int kWide>
__device__ __forceinline__ Columns<float, kWide> load_cos(const Rotary& rotary, int32_t position,
                                                          int32_t pair) {
    return load_angles<T, kWide>(rotary, rotary.cos, rotary.cos_stride, position, pair);
}
template <class T, int kWide>
__device__ __forceinline__ Columns<float, kWide> load_sin(const Rotary& rotary, int32_t position,
                                                          int32_t pair) {
    return load_angles<T, kWide>(rotary, rotary.sin, rotary.sin_stride, position, pair);
}

// Rotates a row that was loaded from `from`: each lane loads the partners of its numbers from there.
template <class T>
__device__ __forceinline__ void apply_rotary(const Rotary& rotary, const T* from, int32_t position,
                                             Row& row) {
    row.for_each(rotary.dim, [&](float& x, int32_t d) {
        const float partner = to_float(from[rotary.partner_of(d)]);
        const float cos = load_cos<T, 1>(rotary, position, rotary.pair_of(d)).at[0];
        const float sin = load_sin<T, 1>(rotary, position, rotary.pair_of(d)).at[0];
        x = rotary.is_second(d) ? rotated_second(partner, x, cos, sin) : rotated_first(x, partner, cos, sin);
    });
}

}  // namespace octavo::cuda
