// What every launcher needs of the CUDA runtime.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace octavo::cuda {

// Throws DeviceError naming `what` if `status` is an error.
void check(cudaError_t status, const char* what);

// Makes `device` current for this thread until the end of the scope.
class DeviceGuard {
  public:
    explicit DeviceGuard(int32_t device);
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int previous_ = -1;
};

int32_t num_sms(int32_t device);
int32_t compute_capability(int32_t device);  // 90 for 9.0
int64_t l2_bytes(int32_t device);
size_t shared_bytes_per_block(int32_t device);  // at most, for a kernel that opts in

// Whether the kernel's code for the current device has the instructions of ptx/grid_dependency.h: it may come
// from the PTX of an older architecture.
bool has_dependent_launch(const void* kernel);
template <class... Parameters>
bool has_dependent_launch(void (*kernel)(Parameters...)) {
    return has_dependent_launch(reinterpret_cast<const void*>(kernel));
}
// The attribute of a launch that overlaps the end of the kernel before it, whose results the kernel waits
// for.
cudaLaunchAttribute dependent_launch();

// One value for each device, made when it is first asked for.
template <class Value>
class PerDevice {
  public:
    template <class Make>
    const Value& get(int32_t device, Make make) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = values_.find(device);
        return found != values_.end() ? found->second : values_.emplace(device, make(device)).first->second;
    }

  private:
    std::mutex mutex_;
    std::map<int32_t, Value> values_;
};

}  // namespace octavo::cuda
