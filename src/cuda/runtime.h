// Helpers around the CUDA runtime that every launcher needs.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <mutex>

namespace octavo::cuda {

// Throws DeviceError naming `what` if `status` is an error.
void check(cudaError_t status, const char* what);

// For tests, before anything asks for the GPU: plans are then made as if it had so many SMs, no more than it
// has.
void plan_for_sms(int32_t num_sms);

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

// One value for each device, made when it is first asked for and kept for good. Since every call asks, an
// existing value is read without a lock.
template <class Value>
class PerDevice {
  public:
    template <class Make>
    const Value& get(int32_t device, Make make) {
        if (const Value* value = find(device)) return *value;
        const std::lock_guard<std::mutex> lock(mutex_);
        if (const Value* value = find(device)) return *value;
        first_.store(new Node{device, make(device), first_.load(std::memory_order_relaxed)},
                     std::memory_order_release);
        return first_.load(std::memory_order_relaxed)->value;
    }

  private:
    struct Node {
        const int32_t device;
        const Value value;
        const Node* const next;
    };

    const Value* find(int32_t device) const {
        for (const Node* node = first_.load(std::memory_order_acquire); node; node = node->next) {
            if (node->device == device) return &node->value;
        }
        return nullptr;
    }

    std::mutex mutex_;
    std::atomic<const Node*> first_{nullptr};
};

}  // namespace octavo::cuda
