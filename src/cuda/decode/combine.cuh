// The two ways to combine partial results of a row. A partial result is a softmax state (the maximum of the
// scores, and the sum of exp2(score - maximum)) and the sums of values with these weights.
//
//     in order   each partial result is added to those before it, with the same roundings wherever they were
//                computed, so that the bits depend on the partial results and their order alone
//     at once    all are scaled to the common maximum and summed, which needs a shorter chain of exponentials
#pragma once

#include "common/online_softmax.h"
#include "cuda/ptx/exp2.h"

namespace octavo::cuda {

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The factors of the partial results so far, and of one more that is added to them.
struct Rescale {
    float before, added;

    // The arguments are the maxima of the partial results so far, of the one that is added, and of all.
    __device__ static Rescale make(float before, float added, float after) {
        return {before == after ? 1.0f : ptx::exp2_approx(before - after),
                added == -INFINITY ? 0.0f : ptx::exp2_approx(added - after)};
    }
    // Adds the softmax states.
    __device__ static Rescale add(SoftmaxState& all, const SoftmaxState& more) {
        const float after = fmaxf(all.max, more.max);
        const Rescale rescale = make(all.max, more.max, after);
        all = {after, rescale(all.sum, more.sum)};
        return rescale;
    }

    __device__ float operator()(float all, float more) const {
        return __fmaf_rn(added, more, __fmul_rn(all, before));
    }
    __device__ float4 operator()(const float4& all, const float4& more) const {
        return make_float4((*this)(all.x, more.x), (*this)(all.y, more.y), (*this)(all.z, more.z),
                           (*this)(all.w, more.w));
    }
};

// Adds four columns of a partial result to those of the ones before it. kSameMax: both have the same maximum,
// so that Rescale would multiply by exactly one (or, if both are empty, add zeros).
template <bool kSameMax>
__device__ __forceinline__ void add_in_order(SoftmaxState& all, float4& out, const SoftmaxState& more,
                                             const float4& more_out) {
    if constexpr (kSameMax) {
        all.sum += more.sum;
        out = out + more_out;
    } else {
        out = Rescale::add(all, more)(out, more_out);
    }
}

// Combines the first `count` of kCount partial results of a row, whose states all lanes know, in order.
template <int kCount>
class CombinedInOrder {
  public:
    SoftmaxState state;

    __device__ CombinedInOrder(const SoftmaxState (&states)[kCount], int count) : count_(count) {
        bool same_max = true;
#pragma unroll
        for (int i = 1; i < kCount; ++i)
            same_max = same_max && (i >= count || states[i].max == states[0].max);
        same_max_ = __all_sync(~0u, same_max);  // lanes agree on it already; the compiler does not know
        state = states[0];
        if (same_max_) {
#pragma unroll
            for (int i = 1; i < kCount; ++i) {
                if (i < count) state.sum += states[i].sum;
            }
        } else {
#pragma unroll
            for (int i = 1; i < kCount; ++i) {
                if (i < count) rescales_[i] = Rescale::add(state, states[i]);
            }
        }
    }

    // Combines four columns.
    __device__ float4 operator()(const float4 (&outs)[kCount]) const {
        float4 out = outs[0];
        if (same_max_) {
#pragma unroll
            for (int i = 1; i < kCount; ++i) {
                if (i < count_) out = out + outs[i];
            }
        } else {
#pragma unroll
            for (int i = 1; i < kCount; ++i) {
                if (i < count_) out = rescales_[i](out, outs[i]);
            }
        }
        return out;
    }

  private:
    Rescale rescales_[kCount];
    int count_;
    bool same_max_;  // whether all maxima are equal, so that nothing has to be rescaled
};

// Combines kCount partial results of a row, whose states all lanes know, at once. Some may be empty.
template <int kCount>
class CombinedAtOnce {
  public:
    SoftmaxState state;

    __device__ explicit CombinedAtOnce(const SoftmaxState (&states)[kCount], int = kCount) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) state.max = fmaxf(state.max, states[i].max);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            weights_[i] = ptx::exp2_approx(states[i].max - state.safe_max());
            state.sum += weights_[i] * states[i].sum;
        }
    }

    // Four columns.
    __device__ float4 operator()(const float4 (&outs)[kCount]) const {
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            out.x += weights_[i] * outs[i].x, out.y += weights_[i] * outs[i].y;
            out.z += weights_[i] * outs[i].z, out.w += weights_[i] * outs[i].w;
        }
        return out;
    }

  private:
    float weights_[kCount];
};

}  // namespace octavo::cuda
