// Asynchronous copies from global to shared memory (sm_80).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace octavo::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes past L1, or writes 16 zero bytes if not `valid`; both addresses are multiples of 16, and
// `global` has to be a mapped address even then.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}

// The same, or nothing if not `enabled`; brings the whole 128 bytes to L2.
__device__ __forceinline__ void cp_async_16_if(bool enabled, uint32_t shared, const void* global,
                                               bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile(
        "{\n .reg .pred enabled;\n setp.ne.b32 enabled, %3, 0;\n"
        " @enabled cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n}" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(static_cast<int>(enabled))
        : "memory");
}

// Copies the first `bytes` bytes, up to 16, and writes zeros behind them.
__device__ __forceinline__ void cp_async_16_part(uint32_t shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}

// Copies 4 bytes through L1, or writes zeros.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global, bool valid) {
    const int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void cp_async_4(void* shared, const void* global, bool valid) {
    cp_async_4(shared_address(shared), global, valid);
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of this thread's groups are pending.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace octavo::cuda::ptx
