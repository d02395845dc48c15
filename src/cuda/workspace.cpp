#include "cuda/workspace.h"

#include "cuda/runtime.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace octavo::cuda {
namespace {

struct Size {
    size_t partial_bytes, num_counters;

    bool fits_in(const Size& other) const {
        return partial_bytes <= other.partial_bytes && num_counters <= other.num_counters;
    }
    Size joined(const Size& other) const {
        return {std::max(partial_bytes, other.partial_bytes), std::max(num_counters, other.num_counters)};
    }
};

// Rounds a size up, so that few calls want more than earlier ones: to a power of two, and what is large to a
// multiple of 64 MiB. Zero stays zero.
size_t rounded_up(size_t size) {
    constexpr size_t kLarge = size_t{64} << 20;
    if (size > kLarge) return (size + kLarge - 1) / kLarge * kLarge;
    size_t power = size > 0 ? 1 : 0;
    while (power < size) power *= 2;
    return power;
}

struct Freer {
    void operator()(char* pointer) const { cudaFree(pointer); }
};
struct StreamDestroyer {
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
using DeviceBytes = std::unique_ptr<char, Freer>;
using OwnedStream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, StreamDestroyer>;

struct Memory {
    Size size;
    DeviceBytes bytes;
    PersistentWorkspace workspace;  // memory of `bytes`
};

// Lets this thread allocate while some stream is being captured: the memory is not part of the graph.
class RelaxedCapture {
  public:
    RelaxedCapture() {
        check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
    }
    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

Memory allocate_memory(const Size& size) {
    constexpr size_t kAlignment = 256;
    const size_t counter_bytes = size.num_counters * sizeof(uint32_t);
    const size_t begin = (counter_bytes + kAlignment - 1) / kAlignment * kAlignment;
    const RelaxedCapture relaxed;  // comes first, so that memory that a failure frees is freed under it, too
    char* pointer = nullptr;
    check(cudaMalloc(&pointer, std::max<size_t>(begin + size.partial_bytes, 1)), "cudaMalloc");
    DeviceBytes bytes(pointer);
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    const OwnedStream side(stream);
    check(cudaMemsetAsync(pointer, 0, counter_bytes, side.get()), "cudaMemsetAsync");
    check(cudaStreamSynchronize(side.get()), "cudaStreamSynchronize");
    return {size, std::move(bytes), {pointer + begin, reinterpret_cast<uint32_t*>(pointer)}};
}

// A stream of a device, or a stream in one of its captures.
struct Owner {
    int32_t device;
    unsigned long long stream, capture;
    WorkspaceUser user;

    bool operator<(const Owner& other) const {
        return std::tie(device, stream, capture, user) <
               std::tie(other.device, other.stream, other.capture, other.user);
    }
};

// Which owner has which memory. The lock is never held during a call of CUDA, since a thread of CUDA's own
// takes it when a graph is gone.
class Owners {
  public:
    // It is never destroyed, since graphs may outlive static objects.
    static Owners& get() {
        static Owners& owners = *new Owners;
        return owners;
    }

    bool contains(const Owner& owner) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return memory_.count(owner) > 0;
    }

    // Returns whether `owner` has as much as it wants, after it has taken over memory that is free. If not,
    // `wanted` grows to at least as much as it has, so that the next memory serves all of its calls.
    bool find(const Owner& owner, Size& wanted, PersistentWorkspace& found) {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::vector<Memory>& own = memory_[owner];
        if (!own.empty()) wanted = wanted.joined(own.back().size);
        if (own.empty() || !wanted.fits_in(own.back().size)) {
            std::vector<Memory>& free = free_[owner.device];
            const auto fitting = std::find_if(
                free.begin(), free.end(), [&](const Memory& memory) { return wanted.fits_in(memory.size); });
            if (fitting == free.end()) return false;
            own.push_back(std::move(*fitting));
            free.erase(fitting);
        }
        found = own.back().workspace;
        return true;
    }

    void give(const Owner& owner, Memory memory) {
        const std::lock_guard<std::mutex> lock(mutex_);
        memory_[owner].push_back(std::move(memory));
    }

    void remove(const Owner& owner) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = memory_.find(owner);
        if (found == memory_.end()) return;  // the owner's first call failed before find()
        std::vector<Memory>& free = free_[owner.device];
        std::move(found->second.begin(), found->second.end(), std::back_inserter(free));
        memory_.erase(found);
    }

  private:
    std::mutex mutex_;
    // Memory that an owner has outgrown is kept: a launch under way, or a graph, may still use it.
    std::map<Owner, std::vector<Memory>> memory_;
    std::map<int32_t, std::vector<Memory>> free_;
};

// Removes the owner once `graph` and all graphs that were made of it are gone, and no launch of them is under
// way: CUDA calls back then.
void remove_with(cudaGraph_t graph, const Owner& owner) {
    auto gone = std::make_unique<std::optional<Owner>>(owner);
    const cudaHostFn_t remove = [](void* pointer) {
        const std::unique_ptr<std::optional<Owner>> gone(static_cast<std::optional<Owner>*>(pointer));
        if (*gone) Owners::get().remove(**gone);
    };
    cudaUserObject_t object;
    check(cudaUserObjectCreate(&object, gone.get(), remove, 1, cudaUserObjectNoDestructorSync),
          "cudaUserObjectCreate");
    std::optional<Owner>* const kept = gone.release();  // `object` owns it now
    const cudaError_t status = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
    if (status != cudaSuccess) {
        kept->reset();  // CUDA may call back after a later call has made the owner known
        cudaUserObjectRelease(object, 1);
    }
    check(status, "cudaGraphRetainUserObject");
}

}  // namespace

PersistentWorkspace persistent_workspace(int32_t device, cudaStream_t stream, size_t partial_bytes,
                                         size_t num_counters, WorkspaceUser user) {
    Owner owner{device, reinterpret_cast<uintptr_t>(stream), 0, user};
    Owners& owners = Owners::get();
    cudaStreamCaptureStatus status;
    cudaGraph_t graph = nullptr;
    check(cudaStreamGetCaptureInfo(stream, &status, &owner.capture, &graph), "cudaStreamGetCaptureInfo");
    if (status == cudaStreamCaptureStatusActive) {
        // find() makes the owner known only after this: a call that fails here leaves nothing behind.
        if (!owners.contains(owner)) remove_with(graph, owner);
    } else {
        owner.capture = 0;
        // Streams are told apart by their id: the handle of the per-thread default stream stands for many
        // streams, and CUDA reuses handles. A stream that is being captured has no id that CUDA would give.
        check(cudaStreamGetId(stream, &owner.stream), "cudaStreamGetId");
    }
    // Sizes double, since a stream keeps the memory that it has outgrown.
    Size wanted{rounded_up(partial_bytes), rounded_up(num_counters)};
    PersistentWorkspace workspace;
    while (!owners.find(owner, wanted, workspace)) owners.give(owner, allocate_memory(wanted));
    return workspace;
}

namespace {

// Octavo has a memory pool of its own, which keeps up to kKeptBytes of freed memory: what an ExpandedPlan
// takes at most, and some for the kernels that run with it. The device's pool would give memory back whenever
// the host waits, and then take longer to get it again than many a kernel takes.
cudaMemPool_t pool_of(int32_t device) {
    static PerDevice<cudaMemPool_t> pools;
    return pools.get(device, [](int32_t device) {
        constexpr uint64_t kKeptBytes = uint64_t{640} << 20;
        cudaMemPoolProps properties{};
        properties.allocType = cudaMemAllocationTypePinned;
        properties.location = {cudaMemLocationTypeDevice, device};
        cudaMemPool_t pool = nullptr;
        check(cudaMemPoolCreate(&pool, &properties), "cudaMemPoolCreate");
        uint64_t kept = kKeptBytes;
        check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept),
              "cudaMemPoolSetAttribute");
        return pool;
    });
}

}  // namespace

Workspace::Workspace(int32_t device, size_t bytes, cudaStream_t stream, WorkspaceUser user)
    : stream_(stream) {
    if (bytes == 0) return;
    cudaStreamCaptureStatus status;
    check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    kept_ = status != cudaStreamCaptureStatusNone;
    if (kept_) {
        pointer_ = persistent_workspace(device, stream, bytes, 0, user).partial;
    } else {
        check(cudaMallocFromPoolAsync(&pointer_, bytes, pool_of(device), stream), "cudaMallocFromPoolAsync");
    }
}

Workspace::~Workspace() {
    if (pointer_ && !kept_) cudaFreeAsync(pointer_, stream_);
}

}  // namespace octavo::cuda
