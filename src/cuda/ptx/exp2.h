// 2^x on the special function unit. The relative error is below 2^-22; subnormal results are flushed to zero.
#pragma once

namespace octavo::cuda::ptx {

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace octavo::cuda::ptx
