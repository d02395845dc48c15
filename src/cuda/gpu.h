// The properties of a GPU that plans depend on.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace octavo::cuda {

struct Gpu {
    int32_t compute_capability;  // 90 for 9.0
    int32_t num_sms;
    int64_t l2_bytes;
    int64_t shared_bytes_per_block;  // the most that a kernel can opt in to
    int32_t memory_gb_per_s;         // the rate of device memory, by its clock and width
    bool has_sm90_kernels;           // whether the GPU runs code for sm_90a, and the build has it
};

// Finds a GPU by name, so that plans can be made without having one: "h100" and other products, or "sm_90"
// and other architectures, each of which stands for the first product that has it. Null if the name is
// unknown. These GPUs are taken to run all kernels that their architecture can.
const Gpu* find_gpu(std::string_view name);
std::vector<std::string> gpu_names();

}  // namespace octavo::cuda
