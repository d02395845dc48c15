// How every kernel is launched.
#pragma once

#include "cuda/runtime.h"

#include <cstddef>
#include <cstdint>

namespace octavo::cuda {

// Properties of a compiled kernel, which are asked for once on each device.
struct KernelTraits {
    // Whether its code has the instructions of ptx/grid_dependency.h: it may come from the PTX of an older
    // architecture, which has neither these nor clusters.
    bool has_grid_dependency;
};

// Lets a block of the kernel take this much shared memory, on the current device. kLeavesRoom: L1 gives up as
// much as it can to shared memory, so that CTAs of another kernel find room beside this kernel's.
template <auto kKernel, size_t kSharedBytes, bool kLeavesRoom>
const KernelTraits& prepare_kernel(int32_t device) {
    static PerDevice<KernelTraits> traits;
    return traits.get(device, [](int32_t) {
        const auto kernel = reinterpret_cast<const void*>(kKernel);
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
              "cudaFuncSetAttribute");
        if (kLeavesRoom) {
            check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                       cudaSharedmemCarveoutMaxShared),
                  "cudaFuncSetAttribute");
        }
        cudaFuncAttributes attributes{};
        check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
        return KernelTraits{attributes.ptxVersion >= 90};
    });
}

struct LaunchShape {
    dim3 grid;
    int32_t threads;
    // Whether the kernel itself waits for the results of the kernel before it, so that it may start while
    // that one ends.
    bool overlaps_previous = false;
    int32_t cluster = 1;       // CTAs, along x
    int32_t shared_bytes = 0;  // how much a CTA takes, if that is less than kSharedBytes
};

// Launches the kernel on a stream of `device`, which must be current. If that fails, the error names `op`.
template <auto kKernel, size_t kSharedBytes = 0, bool kLeavesRoom = false, class... Parameters>
void launch(const char* op, int32_t device, cudaStream_t stream, const LaunchShape& shape,
            const Parameters&... parameters) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.shared_bytes > 0 ? shape.shared_bytes : kSharedBytes;
    config.stream = stream;
    config.attrs = attributes;
    if (kSharedBytes > 0 || shape.overlaps_previous) {
        const KernelTraits& traits = prepare_kernel<kKernel, kSharedBytes, kLeavesRoom>(device);
        if (shape.overlaps_previous && traits.has_grid_dependency) {
            cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
            attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attribute.val.programmaticStreamSerializationAllowed = 1;
        }
    }
    if (shape.cluster > 1) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    }
    check(cudaLaunchKernelEx(&config, kKernel, parameters...), op);
}

}  // namespace octavo::cuda
