// Named barriers, and the handing over of registers between warpgroups (sm_90a).
#pragma once

#include <cstdint>

namespace octavo::cuda::ptx {

// Waits at barrier `id` (1 to 15) for `threads` threads, some of which may only arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Sets how many registers a thread of this warpgroup may use from here on. Every warp of the warpgroup has to
// execute it.
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// x, which is the same in all lanes of a converged warp, as the compiler then knows: what follows from it is
// computed once for the warp, in uniform registers. wgmma takes its descriptors from there; on their way from
// other registers they cost some four instructions a product.
template <class T>
__device__ __forceinline__ T uniform(T x) {
    return __shfl_sync(~0u, x, 0);
}

// True in one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected));
    return elected != 0;
}

}  // namespace octavo::cuda::ptx
