// The operators on CUDA devices: each launches on `stream` (cudaStream_t) and returns. Parameters are
// checked, except for what lies in device memory. A build without CUDA defines them in without_cuda.cpp,
// where each throws DeviceError.
#pragma once

#include "cuda/gpu.h"
#include "params/attention_backward_params.h"
#include "params/attention_params.h"
#include "params/cache_params.h"
#include "params/latent_attention_params.h"
#include "params/linear_params.h"
#include "params/merge_states_params.h"
#include "params/padding.h"
#include "params/paged_attention_params.h"
#include "params/rms_norm_params.h"

#include <octavo/build_info.h>
#include <octavo/explain.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace octavo::cuda {

void attention(const AttentionParams& params, void* stream);
void paged_attention(const PagedAttentionParams& params, void* stream);
void append_kv(const AppendKvParams& params, void* stream);
void copy_pages(const CopyPagesParams& params, void* stream);
void merge_states(const MergeStatesParams& params, void* stream);
void attention_backward(const AttentionBackwardParams& params, void* stream);
void linear(const LinearParams& params, void* stream);
void rms_norm(const RmsNormParams& params, void* stream);
void latent_attention(const LatentAttentionParams& params, void* stream);
// A shared library shows it to the Python extension, though CUDA sources hide what they define.
__attribute__((visibility("default"))) void clear_padding(const Padding& padding, int32_t device,
                                                          void* stream);

// Explain what each would run on a GPU, which need not be one of this machine.
Explanation explain(const AttentionParams& params, const Gpu& gpu);
Explanation explain(const PagedAttentionParams& params, const Gpu& gpu);
Explanation explain(const AppendKvParams& params, const Gpu& gpu);
Explanation explain(const CopyPagesParams& params, const Gpu& gpu);
Explanation explain(const MergeStatesParams& params, const Gpu& gpu);
Explanation explain(const AttentionBackwardParams& params, const Gpu& gpu);
Explanation explain(const LinearParams& params, const Gpu& gpu);
Explanation explain(const RmsNormParams& params, const Gpu& gpu);
Explanation explain(const LatentAttentionParams& params, const Gpu& gpu);

// Waits for `stream` and copies `count` rows of `row_bytes` to the host, where they lie one behind the other.
// On the device they begin `pitch_bytes` apart, which may be less than a row, or negative.
void copy_to_host(void* host, const void* device, int64_t pitch_bytes, int64_t row_bytes, int64_t count,
                  int32_t device_index, void* stream);

// Throws DeviceError, saying why, unless CUDA kernels can run here.
void require_usable();

// The address by which kernels on the device reach this address of host memory; null unless all of [begin,
// end) is pinned.
void* mapped_host_memory(void* address, uintptr_t begin, uintptr_t end, int32_t device_index);

int32_t current_device();

// The properties of this GPU that plans depend on; CUDA is asked once.
const Gpu& gpu_of(int32_t device);

// Makes stream `consumer` wait for the work that stream `producer` holds now; importers of arrays call it.
void order_streams(int32_t device_index, void* producer, void* consumer);
void synchronize(int32_t device_index, void* stream);
// Stream-ordered memory for results handed to frameworks whose allocator cannot be called.
void* allocate(int32_t device_index, size_t bytes, void* stream);
void release(int32_t device_index, void* pointer, void* stream) noexcept;

std::string cuda_version();  // "13.0"; empty without CUDA
std::vector<std::string> architectures();
std::vector<std::string> instances();
std::vector<GpuInfo> gpu_info(std::string* why_none);

}  // namespace octavo::cuda
