// Thread block clusters (sm_90): CTAs that run at once and read each other's shared memory. Elsewhere no
// kernel is launched with them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace octavo::cuda::ptx {

// All threads of all CTAs of the cluster; what they wrote to shared memory before is visible after.
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
#endif
}

// The place of `shared`, an address of this CTA, in the CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t rank) {
    uint32_t address = 0;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
#endif
    return address;
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
