// Reads of shared memory by its own addresses.
#pragma once

#include <cstdint>

namespace octavo::cuda::ptx {

__device__ __forceinline__ float load_shared_float(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

}  // namespace octavo::cuda::ptx
