// Device memory that kernels need besides the arrays of a call.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace octavo::cuda {

// Memory that is kept between launches: room for partial results, and counters that are zero whenever no
// launch is under way.
struct PersistentWorkspace {
    void* partial;
    uint32_t* counters;
};

// Every user has memory of its own, because they use it at the same time: attention with a shared prefix
// keeps its results while the kernels that it launches use theirs, and so do transformed queries, expanded
// codes and parts of sequences; split_kv_decode may run beside the kernel before it (Beside).
enum class WorkspaceUser {
    kernel,
    shared_prefix,
    beside,
    tickets,
    transformed_queries,
    expanded_codes,
    divided_queries,
    normalised_rows,
};
constexpr size_t kNumWorkspaceUsers = static_cast<size_t>(WorkspaceUser::normalised_rows) + 1;

// Returns at least this many bytes and counters, for launches on `stream` of the current device only:
// launches on one stream never overlap. A thread must launch what uses the memory before it calls this for
// the same user again. Streams may be gone without a word: where a device has more than kMostOwners of their
// memories (workspace.cpp), those that were asked for the longest time ago are freed, for which the call
// waits for the device. A stream that lives on gets other memory at its next call.
//
// While the stream is being captured, the memory is for that capture only, since its graph may run on any
// stream; when the graph and all copies of it are gone, other captures take it over. Two executables of one
// captured graph share it and must not run at once. Safe under capture; no part of the graph.
PersistentWorkspace persistent_workspace(int32_t device, cudaStream_t stream, size_t partial_bytes,
                                         size_t num_counters, WorkspaceUser user = WorkspaceUser::kernel);

// Memory of the current device that lives from the constructor to the destructor, in the order of `stream`.
// While the stream is being captured it is kept instead: a graph that allocates could not be part of another.
class Workspace {
  public:
    Workspace(int32_t device, size_t bytes, cudaStream_t stream, WorkspaceUser user = WorkspaceUser::kernel);
    ~Workspace();
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    char* bytes() const { return static_cast<char*>(pointer_); }
    float* floats() const { return static_cast<float*>(pointer_); }

  private:
    void* pointer_ = nullptr;
    cudaStream_t stream_;
    bool kept_ = false;
};

}  // namespace octavo::cuda
