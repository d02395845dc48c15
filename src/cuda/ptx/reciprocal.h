// 1 / x for x between 2^-126 and 2^126. It has the bits of a division, but not its branch for other numbers.
#pragma once

namespace octavo::cuda::ptx {

__device__ __forceinline__ float reciprocal_of_normal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return fmaf(y, -fmaf(x, y, -1.0f), y);
}

}  // namespace octavo::cuda::ptx
