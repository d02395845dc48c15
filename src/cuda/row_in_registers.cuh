// One row of at most kMaxCudaCodeHeadDim numbers in the registers of a warp.
#pragma once

#include "common/hadamard.h"
#include "cuda/types.h"
#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// Lane l has numbers 2 l and 2 l + 1, then the numbers 64 further, and so on. Numbers past the end of the row
// are zeros.
class Row {
  public:
    // Calls body(number, index) with each of this lane's numbers.
    template <class Body>
    __device__ __forceinline__ void for_each(int32_t head_dim, Body body) {
        for_each_of(x_, head_dim, body);
    }
    template <class Body>
    __device__ __forceinline__ void for_each(int32_t head_dim, Body body) const {
        for_each_of(x_, head_dim, body);
    }

    // Rotates the row as common/hadamard.h says. All lanes take part.
    __device__ __forceinline__ void rotate(int32_t head_dim) {
        const int32_t size = hadamard_size(head_dim);
        const auto lane = static_cast<int32_t>(threadIdx.x % kLanes);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (size > 1) sum_and_difference(x_[i][0], x_[i][1]);
        }
#pragma unroll
        for (int distance = 2; distance <= kLanes; distance *= 2) {  // of numbers in different lanes
            if (distance >= size) break;
            const bool is_second = lane & distance / 2;
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float own = x_[i][j], other = __shfl_xor_sync(~0u, own, distance / 2);
                    x_[i][j] = is_second ? rounded_difference(other, own) : rounded_sum(own, other);
                }
            }
        }
#pragma unroll
        for (int step = 1; step < kPairs; step *= 2) {  // of pairs of one lane, which are 64 numbers apart
            if (2 * kLanes * step >= size) break;
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if ((i & step) == 0) sum_and_difference(x_[i][j], x_[i + step][j]);
                }
            }
        }
        const float factor = hadamard_factor(size);
        for_each(head_dim, [factor](float& x, int32_t) { x = rounded_product(x, factor); });
    }

  private:
    static constexpr int kLanes = 32, kPairs = kMaxCudaCodeHeadDim / 2 / kLanes;

    template <class Numbers, class Body>
    __device__ __forceinline__ static void for_each_of(Numbers& x, int32_t head_dim, Body body) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int32_t d = 2 * (i * kLanes + static_cast<int32_t>(threadIdx.x % kLanes)) + j;
                if (d < head_dim) body(x[i][j], d);
            }
        }
    }

    __device__ __forceinline__ static void sum_and_difference(float& a, float& b) {
        const float sum = rounded_sum(a, b), difference = rounded_difference(a, b);
        a = sum;
        b = difference;
    }

    float x_[kPairs][2] = {};
};

template <class T>
__device__ __forceinline__ Row load_row(const T* from, int32_t head_dim) {
    Row row;
    row.for_each(head_dim, [&](float& x, int32_t d) { x = to_float(from[d]); });
    return row;
}

}  // namespace octavo::cuda
