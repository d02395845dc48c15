// Thread block clusters (sm_90): CTAs that run together and read each other's shared memory. On other
// architectures no kernel is launched with clusters.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace octavo::cuda::ptx {

// A barrier of all threads of all CTAs of the cluster. After it, writes to shared memory from before it are
// visible.
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
#endif
}

// The same without any order of memory accesses, since a release is a fence for the whole GPU.
__device__ __forceinline__ void cluster_barrier_relaxed() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The two halves of cluster_barrier_relaxed(). Every thread has to execute both.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

// The address in CTA `rank` of the cluster that corresponds to `shared`, an address in this CTA.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t rank) {
    uint32_t address = 0;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
#endif
    return address;
}

// Stores 16 bytes, which count towards `barrier`, in the same CTA as `address`. Threads that wait at the
// barrier see them.
__device__ __forceinline__ void store_cluster_async(uint32_t address, int4 x, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            address),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier)
        : "memory");
#endif
}

// Copies contiguous bytes, a multiple of 16, of this CTA's shared memory to another CTA's; they count towards
// `barrier`, in the same CTA as `address`.
__device__ __forceinline__ void bulk_copy_cluster(uint32_t address, uint32_t shared, uint32_t bytes,
                                                  uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            address),
        "r"(shared), "r"(bytes), "r"(barrier)
        : "memory");
#endif
}

__device__ __forceinline__ void store_cluster_float2(uint32_t address, float2 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
#endif
}
__device__ __forceinline__ void store_cluster_float4(uint32_t address, float4 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
#endif
}

__device__ __forceinline__ float load_cluster_float(uint32_t address) {
    float x = 0.0f;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address));
#endif
    return x;
}

__device__ __forceinline__ float4 load_cluster_float4(uint32_t address) {
    float4 x{};
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address));
#endif
    return x;
}

}  // namespace octavo::cuda::ptx
