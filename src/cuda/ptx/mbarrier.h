// Barriers in shared memory that count arrivals and the bytes of bulk copies (sm_90).
#pragma once

#include "cuda/ptx/cp_async.h"

namespace octavo::cuda::ptx {

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
                 : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives at a barrier anywhere in the cluster (cluster_address). It does not make this thread's earlier
// writes visible to other CTAs, which would cost a fence for the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_cluster(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Arrives once all copies that this thread has started by cp.async have arrived. The count that the barrier
// was initialised with has to include this.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

// Arrives, and keeps the phase open until `bytes` bytes have arrived, too.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Waits until the phase of this parity has completed. A fresh barrier counts as having completed parity 1.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again_%=;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

}  // namespace octavo::cuda::ptx
