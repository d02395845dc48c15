// The workspace in which CTAs of one launch leave partial results for each other.
//
// There is no fence and no counter: the workspace is zero between launches and no pushed word is zero, so
// that every 16 bytes show by themselves whether they have arrived. Whoever has read them sets them to zero
// again.
//
// Waiting relies on one assumption: the GPU starts the CTAs of a grid in the order of their index, so that a
// CTA which waits for lower ones never holds the place of one that it waits for. This holds on every GPU
// known, but CUDA does not promise it. A build with OCTAVO_TICKETS does without it: there, a CTA's index is
// the number that it draws from a counter when it starts (grid_index).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace octavo::cuda {

struct PartialWorkspace {
    uint32_t* words;
#ifdef OCTAVO_TICKETS
    uint32_t* tickets;  // counts the CTAs that have started
#endif
};

// Returns this CTA's index in the grid, in the order in which CTAs start. All threads call it together, once,
// before the next launch may begin, whose CTAs draw tickets, too.
__device__ __forceinline__ uint3 grid_index([[maybe_unused]] const PartialWorkspace& workspace) {
#ifdef OCTAVO_TICKETS
    __shared__ uint32_t ticket;
    if (threadIdx.x == 0) {
        const uint32_t num_ctas = gridDim.x * gridDim.y * gridDim.z;
        ticket = atomicInc(workspace.tickets, num_ctas - 1);  // the last CTA sets the counter to zero
    }
    __syncthreads();
    return make_uint3(ticket % gridDim.x, ticket / gridDim.x % gridDim.y, ticket / gridDim.x / gridDim.y);
#else
    return make_uint3(blockIdx.x, blockIdx.y, blockIdx.z);
#endif
}

// A number as a word that is never zero: zero becomes -0, which adds and compares as zero does, so that
// whoever reads it has nothing to decode.
struct NonZero {
    __device__ static uint32_t encode(float x) { return __float_as_uint(x == 0.0f ? -0.0f : x); }
    __device__ static float decode(uint32_t word) { return __uint_as_float(word); }
};

}  // namespace octavo::cuda
