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

// How the words of kStepKeys keys and values lie: 16 bytes hold those of keys g and g + 8 and of their
// values.
struct ScalePlaces {
    static constexpr int kBytes = 8 * 16;
    static constexpr int kOfValue = 8;  // bytes from a key's word to its value's

    // Where the scale of key `key` of a block lies.
    __device__ static uint32_t place(int key) { return key / 16 * kBytes + key % 8 * 16 + key % 16 / 8 * 4; }
};

// The words of a lane's keys of a step: of both, or of one (TransposedSoftmax).
template <int kKeys>
struct StepScales {
    uint32_t keys[kKeys], values[kKeys];

    __device__ static StepScales load(uint32_t block, int step) {
        const int lane = threadIdx.x % 32;
        const uint32_t place = block + step * ScalePlaces::kBytes + lane / 4 * 16;
        if constexpr (kKeys == 1) {
            const uint32_t key = place + lane % 4 / 2 * 4;
            return {{ptx::load_shared_4(key)}, {ptx::load_shared_4(key + ScalePlaces::kOfValue)}};
        } else {
            const uint4 words = ptx::load_shared_16(place);
            return {{words.x, words.y}, {words.z, words.w}};
        }
    }
};

}  // namespace octavo::cuda
