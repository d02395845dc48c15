// How partial results come from CTAs that share an item to the one that combines them.
//
// A CTA pushes the rows of its partial result to a workspace (partial_words.cuh), where the CTA that combines
// them waits for them as soon as it has nothing else to do. The reader of a row sets it to zero again.
#pragma once

#include "common/online_softmax.h"
#include "cuda/decode/parameters.h"
#include "cuda/ptx/relaxed.h"

#include <cstdint>

namespace octavo::cuda {

// One row in the workspace: the sums of kHeadDim columns, then the softmax state, one copy for each warp of a
// CTA that may read the row (a reader clears its copy).
template <class Config>
struct PartialRow {
    uint32_t* words;

    __device__ void push_state(const SoftmaxState& state, int reader) const {
        ptx::store_relaxed_8(words + state_at(reader),
                             make_uint2(NonZero::encode(state.max), NonZero::encode(state.sum)));
    }
    // Pushes four columns: 16 bytes, which are written at once, so that one word shows whether all arrived.
    __device__ void push(int column, float4 out) const {
        ptx::store_relaxed_16(words + column, make_uint4(__float_as_uint(out.x), __float_as_uint(out.y),
                                                         __float_as_uint(out.z), NonZero::encode(out.w)));
    }
    // Writes zeros, which the next launch needs.
    __device__ void clear_state(int reader) const {
        *reinterpret_cast<uint2*>(words + state_at(reader)) = make_uint2(0, 0);
    }
    __device__ void clear(int column) const {
        *reinterpret_cast<uint4*>(words + column) = make_uint4(0, 0, 0, 0);
    }
    __device__ static int state_at(int reader) { return Config::kHeadDim + 2 * reader; }
};

// The same row of `count` partial results, `stride_words` apart, for one of its readers.
template <class Config>
struct PartialRows {
    uint32_t* words;
    int32_t stride_words, count;
    int reader;

    __device__ PartialRow<Config> row(int32_t i) const { return {words + i * stride_words}; }

    // Waits for kAtOnce partial results, `first`, first + step and so on: for their states and, if
    // `has_column`, for four columns. All lanes of the warp call this together. In place of partial results
    // past the end, the last one is loaded and left out: if each load depended on a condition, the loads
    // would not all be in flight together.
    template <int kAtOnce>
    __device__ __forceinline__ void wait(SoftmaxState (&states)[kAtOnce], float4 (&outs)[kAtOnce], int column,
                                         bool has_column, int32_t first, int32_t step) const {
        const uint32_t not_needed = has_column ? 0 : 1;
        const int state_at = PartialRow<Config>::state_at(reader);
        uint2 loaded_states[kAtOnce];
        uint4 loaded_outs[kAtOnce];
        uint32_t least;  // zero while some have not arrived
        do {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const uint32_t* const row = words + min(first + i * step, count - 1) * stride_words;
                loaded_states[i] = ptx::load_relaxed_8(row + state_at);
                loaded_outs[i] = ptx::load_relaxed_16(row + column);
            }
            least = ~0u;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                least = min(least,
                            min(min(loaded_states[i].x, loaded_states[i].y), loaded_outs[i].w | not_needed));
            }
        } while (__any_sync(~0u, least == 0));
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            states[i] = SoftmaxState{};
            outs[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (first + i * step >= count) continue;
            states[i] = {NonZero::decode(loaded_states[i].x), NonZero::decode(loaded_states[i].y)};
            outs[i] = make_float4(__uint_as_float(loaded_outs[i].x), __uint_as_float(loaded_outs[i].y),
                                  __uint_as_float(loaded_outs[i].z), NonZero::decode(loaded_outs[i].w));
        }
    }
};

}  // namespace octavo::cuda
