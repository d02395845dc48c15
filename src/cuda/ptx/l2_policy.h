// How long the L2 cache keeps what a load brings.
#pragma once

#include "cuda/ptx/cp_async.h"

namespace octavo::cuda::ptx {

// For data that is read once: it leaves before tables, lengths, partial results and code do.
__device__ __forceinline__ uint64_t evict_first_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// cp_async_16 under a policy.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid, uint64_t policy) {
    const int bytes = valid ? 16 : 0;
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "l"(policy)
        : "memory");
}

}  // namespace octavo::cuda::ptx
