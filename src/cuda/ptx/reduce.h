// Atomic sums in global memory. Each sum is atomic by itself; the order among threads is not determined.
#pragma once

namespace octavo::cuda::ptx {

__device__ __forceinline__ void add_to_global(float* sum, float a) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(a) : "memory");
}

// Adds to four neighbours, aligned to 16 bytes (sm_90).
__device__ __forceinline__ void add_to_global(float* sums, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums), "f"(a), "f"(b),
                 "f"(c), "f"(d)
                 : "memory");
}

}  // namespace octavo::cuda::ptx
