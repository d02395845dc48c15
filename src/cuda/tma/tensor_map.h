// Arrays as the copy engine sees them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace octavo::cuda {

// Five axes, from the innermost, of 16-bit elements; a box is what one copy moves, its rows 128 bytes, in
// shared memory with 128-byte swizzle. Strides of all axes but the first, in elements.
struct TensorMapShape {
    int64_t size[5];
    int64_t stride[4];
    int32_t box[5];
};

// Throws DeviceError if the driver refuses.
CUtensorMap make_tensor_map(const void* base, const TensorMapShape& shape);

}  // namespace octavo::cuda
