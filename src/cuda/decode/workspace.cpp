#include "cuda/decode/workspace.h"

#include "cuda/runtime.h"

#include <map>
#include <mutex>
#include <tuple>

namespace octavo::cuda {
namespace {

struct Entry {
    DecodeWorkspace workspace{};
    size_t partial_bytes = 0, num_counters = 0;
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

void* allocate_zeros(size_t bytes) {
    void* pointer = nullptr;
    check(cudaMalloc(&pointer, bytes), "cudaMalloc");
    cudaStream_t side;
    check(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    cudaError_t status = cudaMemsetAsync(pointer, 0, bytes, side);
    if (status == cudaSuccess) status = cudaStreamSynchronize(side);
    cudaStreamDestroy(side);
    check(status, "cudaMemsetAsync");
    return pointer;
}

}  // namespace

DecodeWorkspace decode_workspace(int32_t device, cudaStream_t stream, size_t partial_bytes,
                                 size_t num_counters, WorkspaceUser user) {
    static std::mutex mutex;
    static std::map<std::tuple<int32_t, unsigned long long, unsigned long long, WorkspaceUser>, Entry> entries;
    // The handle of the per-thread default stream names many streams, and CUDA reuses handles; but a stream
    // that is being captured does not tell its id.
    unsigned long long id = reinterpret_cast<uintptr_t>(stream), capture = 0;
    cudaStreamCaptureStatus status;
    check(cudaStreamGetCaptureInfo(stream, &status, &capture), "cudaStreamGetCaptureInfo");
    if (status != cudaStreamCaptureStatusActive) {
        capture = 0;
        check(cudaStreamGetId(stream, &id), "cudaStreamGetId");
    }

    const std::lock_guard<std::mutex> lock(mutex);
    Entry& entry = entries[{device, id, capture, user}];
    // What is outgrown is kept: a launch under way, or a graph, may still use it.
    if (entry.partial_bytes < partial_bytes) {
        const RelaxedCapture relaxed;
        entry.workspace.partial = allocate_zeros(partial_bytes);
        entry.partial_bytes = partial_bytes;
    }
    if (entry.num_counters < num_counters) {
        const RelaxedCapture relaxed;
        entry.workspace.counters = static_cast<uint32_t*>(allocate_zeros(num_counters * sizeof(uint32_t)));
        entry.num_counters = num_counters;
    }
    return entry.workspace;
}

}  // namespace octavo::cuda
