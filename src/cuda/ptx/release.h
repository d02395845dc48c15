// Accesses by which a thread hands what it, and those it has synchronised with, wrote on to other CTAs.
#pragma once

#include <cstdint>

namespace octavo::cuda::ptx {

__device__ __forceinline__ int32_t load_acquire(const int32_t* from) {
    int32_t x;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

__device__ __forceinline__ void store_release(int32_t* to, int32_t x) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

__device__ __forceinline__ void add_release(int32_t* to, int32_t x) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

}  // namespace octavo::cuda::ptx
