#include "cuda/workspace.h"

#include "cuda/runtime.h"

#include <algorithm>
#include <array>
#include <atomic>
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
    unsigned long long stream, thread, capture;  // the thread: only of cudaStreamPerThread in a capture
    WorkspaceUser user;

    bool operator<(const Owner& other) const {
        return std::tie(device, stream, thread, capture, user) <
               std::tie(other.device, other.stream, other.thread, other.capture, other.user);
    }
};

// An owner's memory. What it has outgrown is kept: a launch under way, or a graph, may still use it.
struct Kept {
    std::vector<Memory> memory;
    uint64_t last_found = 0;  // by the count of all finds
    int32_t num_holders = 0;  // threads that may still have to launch what uses it (HeldByThread)
};

// How many owners that are in no capture a device may have: as many as three users have in 42 streams.
// PyTorch hands out 32 of a priority.
constexpr size_t kMostOwners = 128;

// Which owner has which memory. The lock is never held during a call of CUDA, since a thread of CUDA's own
// takes it when a graph is gone.
//
// CUDA does not say that a stream is gone. So where a device has many owners that are in no capture, those of
// them that were found the longest time ago go (take_oldest), and their memory is freed:
//  - only if no thread holds it (HeldByThread). So all that uses it is launched already, and cudaFree waits
//    for that: it waits for all work that may use memory of cudaMalloc, on which allocators of frameworks
//    count, too. No other way to wait is allowed while some stream, of whoever it is, may be captured.
//  - If the stream lives on, its next call finds no owner and makes one, with memory of its own.
//  - What a capture owns is never taken, since its graph may be launched at any time.
class Owners {
  public:
    // It is never destroyed, since graphs may outlive static objects.
    static Owners& get() {
        static Owners& owners = *new Owners;
        return owners;
    }

    bool contains(const Owner& owner) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return kept_.count(owner) > 0;
    }

    // Returns whether `owner` has as much as it wants, after it has taken over memory that is free. If not,
    // `wanted` grows to at least as much as it has, so that the next memory serves all of its calls. What is
    // found is held in place of `*held`, unless that is null.
    bool find(const Owner& owner, Kept** held, Size& wanted, PersistentWorkspace& found) {
        const std::lock_guard<std::mutex> lock(mutex_);
        Kept& kept = kept_[owner];
        kept.last_found = ++num_finds_;
        std::vector<Memory>& own = kept.memory;
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
        if (held && *held != &kept) {
            if (*held) --(*held)->num_holders;
            ++kept.num_holders;
            *held = &kept;  // it stays where it is while it has holders
        }
        return true;
    }

    void give(const Owner& owner, Memory memory) {
        const std::lock_guard<std::mutex> lock(mutex_);
        kept_[owner].memory.push_back(std::move(memory));
    }

    void release(Kept* held) {
        const std::lock_guard<std::mutex> lock(mutex_);
        --held->num_holders;
    }

    // Takes a capture's owner away, whose memory others may have.
    void remove(const Owner& owner) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = kept_.find(owner);
        if (found == kept_.end()) return;  // the owner's first call failed before find()
        std::vector<Memory>& own = found->second.memory;
        std::vector<Memory>& free = free_[owner.device];
        std::move(own.begin(), own.end(), std::back_inserter(free));
        kept_.erase(found);
    }

    // Takes away half of kMostOwners, if the device has more: those that were not found for the longest time,
    // are in no capture, and are held by no thread. Returns their memory, for the caller to free.
    std::vector<Kept> take_oldest(int32_t device) {
        using Place = std::map<Owner, Kept>::iterator;
        const std::lock_guard<std::mutex> lock(mutex_);
        size_t count = 0;
        std::vector<Place> free_to_go;
        for (Place place = kept_.begin(); place != kept_.end(); ++place) {
            if (place->first.device != device || place->first.capture != 0) continue;
            ++count;
            if (place->second.num_holders == 0) free_to_go.push_back(place);
        }
        if (count <= kMostOwners) return {};
        std::sort(free_to_go.begin(), free_to_go.end(),
                  [](const Place& a, const Place& b) { return a->second.last_found < b->second.last_found; });
        free_to_go.resize(std::min(free_to_go.size(), kMostOwners / 2));
        std::vector<Kept> taken;
        taken.reserve(free_to_go.size());
        for (const Place& place : free_to_go) {
            taken.push_back(std::move(place->second));
            kept_.erase(place);
        }
        return taken;
    }

  private:
    std::mutex mutex_;
    std::map<Owner, Kept> kept_;
    std::map<int32_t, std::vector<Memory>> free_;
    uint64_t num_finds_ = 0;
};

// What this thread got last for each user, outside of captures. It holds it until it gets memory for the same
// user again, and has by then launched what uses it.
struct HeldByThread {
    std::array<Kept*, kNumWorkspaceUsers> of_users{};

    ~HeldByThread() {
        for (Kept* held : of_users) {
            if (held) Owners::get().release(held);
        }
    }
};
thread_local HeldByThread held_by_thread;

void free_oldest(int32_t device) {
    const RelaxedCapture relaxed;
    Owners::get().take_oldest(device);  // which is freed right here
}

// A number that no other thread has, or had.
unsigned long long number_of_thread() {
    static std::atomic<unsigned long long> num_threads{0};
    thread_local const unsigned long long number = ++num_threads;
    return number;
}

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
    Owner owner{device, reinterpret_cast<uintptr_t>(stream), 0, 0, user};
    Kept** held = nullptr;
    Owners& owners = Owners::get();
    cudaStreamCaptureStatus status;
    cudaGraph_t graph = nullptr;
    check(cudaStreamGetCaptureInfo(stream, &status, &owner.capture, &graph), "cudaStreamGetCaptureInfo");
    if (status == cudaStreamCaptureStatusActive) {
        // This handle stands for a stream of each thread, and threads may join one capture.
        if (stream == cudaStreamPerThread) owner.thread = number_of_thread();
        // find() makes the owner known only after this: a call that fails here leaves nothing behind.
        if (!owners.contains(owner)) remove_with(graph, owner);
    } else {
        owner.capture = 0;
        // Streams are told apart by their id: the handle of the per-thread default stream stands for many
        // streams, and CUDA reuses handles. A stream that is being captured has no id that CUDA would give.
        check(cudaStreamGetId(stream, &owner.stream), "cudaStreamGetId");
        held = &held_by_thread.of_users[static_cast<size_t>(user)];
    }
    // Sizes double, since a stream keeps the memory that it has outgrown.
    Size wanted{rounded_up(partial_bytes), rounded_up(num_counters)};
    PersistentWorkspace workspace;
    while (!owners.find(owner, held, wanted, workspace)) {
        if (held) free_oldest(device);
        owners.give(owner, allocate_memory(wanted));
    }
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
