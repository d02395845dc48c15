// Parts of a row's result, added in their order.
#pragma once

#include "common/online_softmax.h"
#include "cuda/ptx/exp2.h"

namespace octavo::cuda {

// One more part after those before it: what both are multiplied by. The same roundings wherever it stands, so
// that the bits depend on the parts and their order alone.
struct FoldStep {
    float before, weight;

    // By the maximum before, of the part, and after.
    __device__ static FoldStep make(float before, float part, float after) {
        return {before == after ? 1.0f : ptx::exp2_approx(before - after),
                part == -INFINITY ? 0.0f : ptx::exp2_approx(part - after)};
    }
    // Adds the part to the softmax.
    __device__ static FoldStep add(SoftmaxState& all, const SoftmaxState& part) {
        const float after = fmaxf(all.max, part.max);
        const FoldStep step = make(all.max, part.max, after);
        all = {after, step(all.sum, part.sum)};
        return step;
    }

    __device__ float operator()(float all, float part) const {
        return __fmaf_rn(weight, part, __fmul_rn(all, before));
    }
    __device__ float4 operator()(const float4& all, const float4& part) const {
        return make_float4((*this)(all.x, part.x), (*this)(all.y, part.y), (*this)(all.z, part.z),
                           (*this)(all.w, part.w));
    }
};

// Up to kMost parts at once, one a lane: lane i knows the step of part i.
template <int kMost>
class FoldSteps {
  public:
    // `part`: this lane's, of lanes below `count`. All lanes get the sum of all.
    __device__ FoldSteps(SoftmaxState& all, const SoftmaxState& part, int count) : count_(count) {
        const int lane = threadIdx.x % 32;
        const SoftmaxState own = lane < count ? part : SoftmaxState{};
        float after = own.max;
#pragma unroll
        for (int step = 1; step < kMost; step *= 2) {
            const float lower = __shfl_up_sync(~0u, after, step);
            if (lane >= step) after = fmaxf(after, lower);
        }
        const float before = __shfl_up_sync(~0u, after, 1);
        own_ = FoldStep::make(before, own.max, after);  // part 0 needs none
        all.max = __shfl_sync(~0u, after, kMost - 1);
        add(all.sum, [&](int i) { return __shfl_sync(~0u, own.sum, i); });
    }

    // The sum of the parts that part_of(i) gives, which may be called for others than those below `count`.
    template <class Value, class PartOf>
    __device__ void add(Value& all, PartOf part_of) const {
        all = part_of(0);
#pragma unroll
        for (int i = 1; i < kMost; ++i) {  // no branch: the warp stays together
            const FoldStep step{__shfl_sync(~0u, own_.before, i), __shfl_sync(~0u, own_.weight, i)};
            const Value sum = step(all, part_of(i));
            if (i < count_) all = sum;
        }
    }

  private:
    FoldStep own_;
    int count_;
};

}  // namespace octavo::cuda
