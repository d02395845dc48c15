// Memory that the decode kernel keeps between launches: room for partial results, and counters that are zero
// whenever no launch is under way.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace octavo::cuda {

struct DecodeWorkspace {
    void* partial;
    uint32_t* counters;
};

// The cascade keeps what it has while kernels that it launches use theirs.
enum class WorkspaceUser { kernel, cascade };

// At least so many bytes and counters, for launches on `stream` of the current device only: launches on one
// stream never overlap, and every user has memory of its own. While the stream is being captured, for that capture only, since its graph may run on
// any stream. Safe under capture; lives as long as the process. Two
// executables of one captured graph share it and must not run at once.
DecodeWorkspace decode_workspace(int32_t device, cudaStream_t stream, size_t partial_bytes,
                                 size_t num_counters, WorkspaceUser user = WorkspaceUser::kernel);

}  // namespace octavo::cuda
