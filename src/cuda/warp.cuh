// Sums, maxima and other functions that the 32 lanes of a warp compute together.
#pragma once

#include <cstdint>

namespace octavo::cuda {

// Keeps a value that never changes in a register, where the compiler would compute it again in every turn of
// a loop.
template <class T>
__device__ __forceinline__ void pin_in_register(T& value) {
    if constexpr (sizeof(T) == 8) {
        asm volatile("" : "+l"(value));
    } else {
        asm volatile("" : "+r"(value));
    }
}

// The sum over this lane and the lanes before it.
__device__ __forceinline__ int32_t inclusive_sum(int32_t x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int32_t lower = __shfl_up_sync(~0u, x, step);
        if (lane >= step) x += lower;
    }
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

}  // namespace octavo::cuda
