// How long the L2 cache keeps what a load brings.
#pragma once

#include "cuda/ptx/cp_async.h"

namespace octavo::cuda::ptx {

// For data that is read once: it leaves before tables, lengths, partial results and code do. What
// createpolicy.fractional.L2::evict_first gives for the whole of the data; a constant costs no register.
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
constexpr uint64_t kEvictNormal = 0x1000000000000000;  // as without a policy
// For what every CTA reads while data that is read once streams by.
constexpr uint64_t kEvictLast = 0x14F0000000000000;

// Copies 16 bytes past L1, or writes 16 zero bytes if not `valid`; see cp_async_16.
__device__ __forceinline__ void cp_async_16_evict_first(uint32_t shared, const void* global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared),
                 "l"(global), "r"(bytes), "l"(kEvictFirst)
                 : "memory");
}

}  // namespace octavo::cuda::ptx
