#include "cuda/tma/tensor_map.h"

#include "cuda/runtime.h"

#include <octavo/error.h>

#include <string>

namespace octavo::cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Finds the driver's function at run time, so that the library loads where there is no driver.
Encode find_encode() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                           &found),
          "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess)
        throw DeviceError("the NVIDIA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap make_tensor_map(const void* base, const TensorMapShape& shape) {
    static const Encode encode = find_encode();
    cuuint64_t sizes[5], strides[4];
    cuuint32_t box[5], steps[5];
    for (int axis = 0; axis < 5; ++axis) {
        sizes[axis] = shape.size[axis];
        box[axis] = shape.box[axis];
        steps[axis] = 1;
        if (axis > 0) strides[axis - 1] = 2 * shape.stride[axis - 1];
    }
    CUtensorMap map;
    const CUresult status =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, const_cast<void*>(base), sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE,
               shape.box[0] == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) throw DeviceError("cuTensorMapEncodeTiled: error " + std::to_string(status));
    return map;
}

}  // namespace octavo::cuda
