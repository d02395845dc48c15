// Accesses to memory that CTAs share while they run: they go to the L2 cache, and order no other accesses.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace octavo::cuda::ptx {

template <class Word>
__device__ __forceinline__ Word load_relaxed(const Word* from) {
    static_assert(sizeof(Word) == 4);
    Word x;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

__device__ __forceinline__ uint2 load_relaxed_8(const void* from) {
    uint64_t x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
    return make_uint2(static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32));
}
__device__ __forceinline__ void store_relaxed_8(void* to, uint2 x) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(uint64_t{x.y} << 32 | x.x) : "memory");
}

// Loads 16 bytes at once: a reader sees the whole of one store.
__device__ __forceinline__ uint4 load_relaxed_16(const void* from) {
    uint64_t low, high;
    asm volatile("{\n .reg .b128 x;\n ld.relaxed.gpu.global.b128 x, [%2];\n mov.b128 {%0, %1}, x;\n}"
                 : "=l"(low), "=l"(high)
                 : "l"(from)
                 : "memory");
    return make_uint4(static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                      static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32));
}
__device__ __forceinline__ void store_relaxed_16(void* to, uint4 x) {
    asm volatile(
        "{\n .reg .b128 x;\n mov.b128 x, {%1, %2};\n st.relaxed.gpu.global.b128 [%0], x;\n}" ::"l"(to),
        "l"(uint64_t{x.y} << 32 | x.x), "l"(uint64_t{x.w} << 32 | x.z)
        : "memory");
}

}  // namespace octavo::cuda::ptx
