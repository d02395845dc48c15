// Policies for how long the L2 cache keeps loaded data.
#pragma once

#include "cuda/ptx/cp_async.h"

namespace octavo::cuda::ptx {

// For data that is read once: it leaves the cache before tables, lengths, partial results and code do. The
// value is the one that createpolicy.fractional.L2::evict_first gives for all of the data; as a constant it
// costs no register.
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
constexpr uint64_t kEvictNormal = 0x1000000000000000;  // acts like no policy
// For data that every CTA reads, while other data, which is read once, streams by.
constexpr uint64_t kEvictLast = 0x14F0000000000000;

// Copies 16 bytes past L1, or writes 16 zero bytes if not `valid`; see cp_async_16.
__device__ __forceinline__ void cp_async_16_evict_first(uint32_t shared, const void* global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared),
                 "l"(global), "r"(bytes), "l"(kEvictFirst)
                 : "memory");
}

// Starts to load the line of an address into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

}  // namespace octavo::cuda::ptx
