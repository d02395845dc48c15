// Allocates the workspace of partial_words.cuh.
#pragma once

#include "cuda/partial_words.cuh"
#include "cuda/workspace.h"

#include <cstdint>

namespace octavo::cuda {

// The workspace of at least `num_words` words for launches on `stream`.
inline PartialWorkspace partial_workspace(int32_t device, cudaStream_t stream, int64_t num_words,
                                          WorkspaceUser user = WorkspaceUser::kernel) {
#ifdef OCTAVO_TICKETS
    // CTAs draw tickets while the kernel before this one may still be running, so tickets have words of their
    // own.
    uint32_t* const tickets = persistent_workspace(device, stream, 0, 1, WorkspaceUser::tickets).counters;
    return {persistent_workspace(device, stream, 0, num_words, user).counters, tickets};
#else
    if (num_words == 0) return {nullptr};
    return {persistent_workspace(device, stream, 0, num_words, user).counters};
#endif
}

}  // namespace octavo::cuda
