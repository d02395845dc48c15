// Descriptions of arrays for the copy engine (tensor memory accelerator).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace octavo::cuda {

// A tensor of five axes of 16-bit elements, from the innermost axis on. One copy moves a box, whose rows are
// 128 or 64 bytes; in shared memory they have a swizzle of as many bytes. Strides are those of all axes but
// the first, in elements.
struct TensorMapShape {
    int64_t size[5];
    int64_t stride[4];
    int32_t box[5];
};

// Throws DeviceError if the driver refuses.
CUtensorMap make_tensor_map(const void* base, const TensorMapShape& shape);

}  // namespace octavo::cuda
