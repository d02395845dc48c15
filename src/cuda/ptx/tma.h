// Copies boxes of a tensor of five axes between global and shared memory, by the tensor memory accelerator,
// here called the copy engine (sm_90). Coordinates run from the innermost axis; elements outside the tensor
// are loaded as zeros and never stored. For a box that lies outside altogether, the copy engine reads the
// tensor's first bytes all the same (seen on an H100).
#pragma once

#include "cuda/ptx/cp_async.h"

#include <cuda.h>

namespace octavo::cuda::ptx {

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads one box; its bytes, those outside the tensor too, count towards `barrier`.
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap* map, uint64_t* barrier, int c0,
                                         int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6, %7}], [%2];" ::"r"(shared_address(shared)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// The same, kept in the L2 cache as `policy` says (l2_policy.h).
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap* map, uint64_t* barrier,
                                         uint64_t policy, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(shared_address(shared)),
        "l"(map), "r"(shared_address(barrier)), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// Loads one box into the same place in each CTA of the cluster whose bit in `ctas` is set. The bytes count
// towards each CTA's own barrier.
__device__ __forceinline__ void tma_load_multicast(void* shared, const CUtensorMap* map, uint64_t* barrier,
                                                   uint16_t ctas, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], "
        "[%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(shared_address(shared)),
        "l"(map), "r"(shared_address(barrier)), "h"(ctas), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// Loads contiguous bytes, a multiple of 16; they count towards `barrier`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* shared, int c0, int c1, int c2,
                                          int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
        "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// The same, kept in the L2 cache as `policy` says (l2_policy.h).
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* shared, uint64_t policy, int c0,
                                          int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%3, %4, %5, %6, %7}], "
        "[%1], %2;" ::"l"(map),
        "r"(shared_address(shared)), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until the sources of all but the last `kPending` groups of this thread's stores may be overwritten.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's writes to shared memory before later reads of them by the copy engine or wgmma.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same of global memory, and of writes that this thread has waited for.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace octavo::cuda::ptx
