// Programmatic dependent launch (sm_90): a kernel launched with the attribute may start while the one before
// it in the stream still runs. Elsewhere there is nothing to wait for.
#pragma once

namespace octavo::cuda::ptx {

// Until the kernels before this one are complete and what they wrote is visible.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may take the place of this one's CTAs as they end.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace octavo::cuda::ptx
