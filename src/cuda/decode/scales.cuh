// The scales of a block's codes in shared memory.
#pragma once

#include "cuda/decode/parameters.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/load_shared.h"

#include <cstdint>

namespace octavo::cuda {

// Whether scales lie in memory, as those of int4 always do. Otherwise softmax_scale and out_scale include
// them.
template <class Config>
__device__ __forceinline__ bool has_scales(const CodeLayout& layout) {
    return Config::kValueBits == 4 || layout.has_scales;
}

// How the words of kStepKeys keys and values lie: 16 bytes hold those that one lane needs, for keys g and g +
// 8 and for their values.
struct StepScales {
    uint32_t keys[2], values[2];

    static constexpr int kBytes = 8 * 16;
    static constexpr int kOfValue = 8;  // bytes from a key's word to its value's

    // Where the scale of key `key` of a block lies.
    __device__ static uint32_t place(int key) { return key / 16 * kBytes + key % 8 * 16 + key % 16 / 8 * 4; }
    // Loads the scales of this lane's keys of a step.
    __device__ static StepScales load(uint32_t block, int step) {
        const uint4 words = ptx::load_shared_16(block + step * kBytes + threadIdx.x % 32 / 4 * 16);
        return {{words.x, words.y}, {words.z, words.w}};
    }
};

}  // namespace octavo::cuda
