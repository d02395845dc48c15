// Programmatic dependent launch (sm_90): a kernel launched with the attribute may start while the one before
// it in the stream still runs. On other architectures there is nothing to wait for.
#pragma once

namespace octavo::cuda::ptx {

// Waits until the kernels before this one are complete and their writes are visible.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next kernel to start: its CTAs take the places of this kernel's as these end.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace octavo::cuda::ptx
