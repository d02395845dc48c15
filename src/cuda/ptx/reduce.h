// Atomic sums in global memory (sm_90).
#pragma once

namespace octavo::cuda::ptx {

// Adds to four neighbours, aligned to 16 bytes. Each sum is atomic by itself; the order among threads is not
// determined.
__device__ __forceinline__ void add_to_global(float* sums, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums), "f"(a), "f"(b),
                 "f"(c), "f"(d)
                 : "memory");
}

}  // namespace octavo::cuda::ptx
