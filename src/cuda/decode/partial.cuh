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
    __device__ static int state_at(int reader) { return Config::kHeadDim + 2 * reader; }
};

// The same row of `count` partial results, `stride_words` apart, for one of its readers.
template <class Config>
struct PartialRows {
    uint32_t* words;
    int32_t stride_words, count;
    int reader;

    // Waits for kAtOnce partial results, `first`, first + step and so on: for their states and, if
    // `has_column`, for four columns. Then sets these columns to zero and, if `clears_states`, the states; a
    // lane without columns leaves those that it loads to their owner, which may be in another warp. All lanes
    // of the warp call this together. In place of partial results past the end, the last one is loaded again
    // and left out: if each load depended on a condition, the loads would not all be in flight together.
    template <int kAtOnce>
    __device__ __forceinline__ void take(SoftmaxState (&states)[kAtOnce], float4 (&outs)[kAtOnce], int column,
                                         bool has_column, bool clears_states, int32_t first,
                                         int32_t step) const {
        const uint32_t not_needed = has_column ? 0 : 1;
        uint32_t *state_words[kAtOnce], *out_words[kAtOnce];
        const uint32_t stride = stride_words * sizeof(uint32_t), last = (count - 1) * stride;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const uint32_t bytes = min(first * stride + i * (step * stride), last);
            state_words[i] = behind(bytes, PartialRow<Config>::state_at(reader));
            out_words[i] = behind(bytes, column);
        }
        uint2 loaded_states[kAtOnce];
        uint4 loaded_outs[kAtOnce];
        uint32_t least;  // zero while some have not arrived
        do {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                loaded_states[i] = ptx::load_relaxed_8(state_words[i]);
                loaded_outs[i] = ptx::load_relaxed_16(out_words[i]);
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
            if (has_column) *reinterpret_cast<uint4*>(out_words[i]) = make_uint4(0, 0, 0, 0);
            if (clears_states) *reinterpret_cast<uint2*>(state_words[i]) = make_uint2(0, 0);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            states[i] = {NonZero::decode(loaded_states[i].x), NonZero::decode(loaded_states[i].y)};
            outs[i] = make_float4(__uint_as_float(loaded_outs[i].x), __uint_as_float(loaded_outs[i].y),
                                  __uint_as_float(loaded_outs[i].z), NonZero::decode(loaded_outs[i].w));
        }
        if (first + (kAtOnce - 1) * step < count) return;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (first + i * step < count) continue;
            states[i] = SoftmaxState{};
            outs[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

  private:
    // A word of the partial result that lies `bytes` behind the first one.
    __device__ uint32_t* behind(uint32_t bytes, int word) const {
        return reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(words + word) + bytes);
    }
};

}  // namespace octavo::cuda
