#include "cuda/runtime.h"

#include "cuda/attention/plan.h"
#include "cuda/attention_backward/plan.h"
#include "cuda/backend.h"
#include "cuda/latent/plan.h"
#include "cuda/linear/plan.h"

#include <octavo/error.h>

#include <algorithm>
#include <atomic>
#include <string>

namespace octavo::cuda {
namespace {

// Why no kernel can run here, or an empty string.
std::string why_unusable() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess && count > 0) return {};
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (status == cudaErrorInsufficientDriver && driver == 0) return "no NVIDIA driver found (libcuda.so.1)";
    if (status == cudaErrorInsufficientDriver) {
        return "the NVIDIA driver supports CUDA " + std::to_string(driver / 1000) + "." +
               std::to_string(driver % 1000 / 10) + ", and this build needs CUDA " + cuda_version();
    }
    if (status == cudaSuccess || status == cudaErrorNoDevice) return "the NVIDIA driver shows no GPU";
    return std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
}

int32_t attribute(cudaDeviceAttr which, int32_t device) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
}

std::atomic<int32_t> planned_sms{0};  // 0: as many as the GPU has

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    std::string text =
        std::string(what) + ": " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + ")";
    if (status == cudaErrorNoKernelImageForDevice) {
        text += "; this build has kernels for";
        for (const std::string& architecture : architectures()) text += " " + architecture;
    }
    throw DeviceError(text);
}

DeviceGuard::DeviceGuard(int32_t device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ == device) {
        previous_ = -1;
    } else {
        check(cudaSetDevice(device), "cudaSetDevice");
    }
}

DeviceGuard::~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
}

void plan_for_sms(int32_t num_sms) { planned_sms = num_sms; }

const Gpu& gpu_of(int32_t device) {
    static PerDevice<Gpu> gpus;
    return gpus.get(device, [](int32_t device) {
        Gpu gpu{};
        gpu.compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                                 attribute(cudaDevAttrComputeCapabilityMinor, device);
        gpu.num_sms = attribute(cudaDevAttrMultiProcessorCount, device);
        if (const int32_t planned = planned_sms) gpu.num_sms = std::min(gpu.num_sms, planned);
        gpu.l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
        gpu.shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        const int64_t kbit_per_s = int64_t{2} * attribute(cudaDevAttrMemoryClockRate, device) *
                                   attribute(cudaDevAttrGlobalMemoryBusWidth, device);
        gpu.memory_gb_per_s = static_cast<int32_t>(kbit_per_s / 8 / 1000000);
        gpu.has_sm90_kernels = OCTAVO_HAS_SM90_KERNELS && gpu.compute_capability == 90;
        return gpu;
    });
}

void require_usable() {
    static std::atomic<bool> known_usable{false};  // remembered, since every call asks
    if (known_usable.load(std::memory_order_relaxed)) return;
    const std::string why = why_unusable();
    if (!why.empty()) throw DeviceError("CUDA arrays cannot be used here: " + why);
    known_usable.store(true, std::memory_order_relaxed);
}

void copy_to_host(void* host, const void* device, int64_t pitch_bytes, int64_t row_bytes, int64_t count,
                  int32_t device_index, void* stream) {
    if (row_bytes == 0 || count == 0) return;
    const DeviceGuard guard(device_index);
    // A copy in 2D takes rows that do not overlap, less than 2 GiB apart.
    if (pitch_bytes >= row_bytes && pitch_bytes <= INT32_MAX) {
        check(cudaMemcpy2DAsync(host, row_bytes, device, pitch_bytes, row_bytes, count,
                                cudaMemcpyDeviceToHost, as_stream(stream)),
              "cudaMemcpy2DAsync");
    } else {
        for (int64_t row = 0; row < count; ++row) {
            check(cudaMemcpyAsync(static_cast<char*>(host) + row * row_bytes,
                                  static_cast<const char*>(device) + row * pitch_bytes, row_bytes,
                                  cudaMemcpyDeviceToHost, as_stream(stream)),
                  "cudaMemcpyAsync");
        }
    }
    check(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize");
}

void* mapped_host_memory(void* address, uintptr_t begin, uintptr_t end, int32_t device_index) {
    const DeviceGuard guard(device_index);
    auto mapped = [](const void* address) -> void* {
        cudaPointerAttributes attributes{};
        check(cudaPointerGetAttributes(&attributes, address), "cudaPointerGetAttributes");
        const bool is_pinned =
            attributes.type == cudaMemoryTypeHost || attributes.type == cudaMemoryTypeManaged;
        return is_pinned ? attributes.devicePointer : nullptr;
    };
    const bool is_pinned =
        mapped(reinterpret_cast<const void*>(begin)) && mapped(reinterpret_cast<const void*>(end - 1));
    return is_pinned ? mapped(address) : nullptr;
}

int32_t current_device() {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    return device;
}

void order_streams(int32_t device_index, void* producer, void* consumer) {
    if (producer == consumer) return;
    const DeviceGuard guard(device_index);
    cudaEvent_t event;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    cudaError_t status = cudaEventRecord(event, as_stream(producer));
    if (status == cudaSuccess) status = cudaStreamWaitEvent(as_stream(consumer), event, 0);
    cudaEventDestroy(event);  // CUDA frees it once the event has completed
    check(status, "ordering one stream after another");
}

void synchronize(int32_t device_index, void* stream) {
    const DeviceGuard guard(device_index);
    check(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize");
}

void* allocate(int32_t device_index, size_t bytes, void* stream) {
    const DeviceGuard guard(device_index);
    void* pointer = nullptr;
    if (bytes > 0) check(cudaMallocAsync(&pointer, bytes, as_stream(stream)), "cudaMallocAsync");
    return pointer;
}

void release(int32_t device_index, void* pointer, void* stream) noexcept {
    if (!pointer) return;
    int previous = -1;
    cudaGetDevice(&previous);
    cudaSetDevice(device_index);
    cudaFreeAsync(pointer, as_stream(stream));
    cudaSetDevice(previous);
}

std::string cuda_version() {
    return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

std::vector<std::string> architectures() {
    return {
#include "architectures.inc"
    };
}

std::vector<std::string> instances() {
    std::vector<std::string> names = attention_instances(OCTAVO_HAS_SM90_KERNELS);
    for (std::string& name : backward_instances(OCTAVO_HAS_SM90_KERNELS)) names.push_back(std::move(name));
    for (std::string& name : linear_instances(OCTAVO_HAS_SM90_KERNELS)) names.push_back(std::move(name));
    for (std::string& name : latent_attention_instances()) names.push_back(std::move(name));
    return names;
}

std::vector<GpuInfo> gpu_info(std::string* why_none) {
    std::vector<GpuInfo> gpus;
    const std::string why = why_unusable();
    if (why_none) *why_none = why;
    if (!why.empty()) return gpus;
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    for (int index = 0; index < count; ++index) {
        cudaDeviceProp properties;
        check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
        gpus.push_back({index, properties.name, properties.major, properties.minor,
                        properties.multiProcessorCount, static_cast<long long>(properties.totalGlobalMem)});
    }
    return gpus;
}

}  // namespace octavo::cuda
