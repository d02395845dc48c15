// The CUDA backend of a build without CUDA: every use throws an error that says so.
#include "cuda/backend.h"

#include <octavo/error.h>

namespace octavo::cuda {
namespace {

// cmake/cuda.cmake makes the text: that the build is for the CPU only, why, and how to get CUDA.
constexpr const char* kWhy =
#include "why_cpu_only.inc"
    ;

[[noreturn]] void refuse() { throw DeviceError(std::string("CUDA arrays cannot be used here: ") + kWhy); }

}  // namespace

void attention(const AttentionParams&, void*) { refuse(); }
void paged_attention(const PagedAttentionParams&, void*) { refuse(); }
void append_kv(const AppendKvParams&, void*) { refuse(); }
void copy_pages(const CopyPagesParams&, void*) { refuse(); }
void merge_states(const MergeStatesParams&, void*) { refuse(); }
void attention_backward(const AttentionBackwardParams&, void*) { refuse(); }
void linear(const LinearParams&, void*) { refuse(); }
void rms_norm(const RmsNormParams&, void*) { refuse(); }
void latent_attention(const LatentAttentionParams&, void*) { refuse(); }
void clear_padding(const Padding&, int32_t, void*) { refuse(); }
void copy_to_host(void*, const void*, int64_t, int64_t, int64_t, int32_t, void*) { refuse(); }
void* mapped_host_memory(void*, uintptr_t, uintptr_t, int32_t) { refuse(); }
void require_usable() { refuse(); }
int32_t current_device() { refuse(); }
const Gpu& gpu_of(int32_t) { refuse(); }
void order_streams(int32_t, void*, void*) { refuse(); }
void synchronize(int32_t, void*) { refuse(); }
void* allocate(int32_t, size_t, void*) { refuse(); }
void release(int32_t, void*, void*) noexcept {}

std::string cuda_version() { return {}; }
std::vector<std::string> architectures() { return {}; }
std::vector<std::string> instances() { return {}; }

std::vector<GpuInfo> gpu_info(std::string* why_none) {
    if (why_none) *why_none = kWhy;
    return {};
}

}  // namespace octavo::cuda
