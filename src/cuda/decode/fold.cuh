// Parts of a row's result, added in their order.
#pragma once

#include "common/online_softmax.h"
#include "cuda/ptx/exp2.h"

namespace octavo::cuda {

// One more part after those before it: what both are multiplied by. The same roundings wherever it stands, so
// that the bits depend on the parts and their order alone.
struct Rescale {
    float before, weight;

    // By the maximum before, of the part, and after.
    __device__ static Rescale make(float before, float part, float after) {
        return {before == after ? 1.0f : ptx::exp2_approx(before - after),
                part == -INFINITY ? 0.0f : ptx::exp2_approx(part - after)};
    }
    // Adds the part to the softmax.
    __device__ static Rescale add(SoftmaxState& all, const SoftmaxState& part) {
        const float after = fmaxf(all.max, part.max);
        const Rescale step = make(all.max, part.max, after);
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

// A row's sums over some keys, known to a warp: each lane has a few groups of four columns.
template <class Config>
struct RowSum {
    static constexpr int kColumns = Config::kHeadDim / 4, kColumnsOfLane = (kColumns + 31) / 32;
    SoftmaxState state;
    float4 out[kColumnsOfLane];

    __device__ void add(const RowSum& part) {
        const Rescale step = Rescale::add(state, part.state);
#pragma unroll
        for (int c = 0; c < kColumnsOfLane; ++c) out[c] = step(out[c], part.out[c]);
    }

    // Calls body(c, first column) for this lane's groups; where there are fewer than lanes, some lanes repeat
    // the last one, which is not their own.
    template <class Body>
    __device__ static void for_each_column(Body body) {
#pragma unroll
        for (int c = 0; c < kColumnsOfLane; ++c) body(c, 4 * min(group(c), kColumns - 1));
    }
    __device__ static bool owns(int c) { return kColumns % 32 == 0 || group(c) < kColumns; }

  private:
    __device__ static int group(int c) { return static_cast<int>(threadIdx.x % 32) + 32 * c; }
};

// The sum of the parts that part_of(i) gives, from the left.
template <class Config, class PartOf>
__device__ __forceinline__ RowSum<Config> fold(int count, PartOf part_of) {
    RowSum<Config> all = part_of(0);
#pragma unroll 4
    for (int i = 1; i < count; ++i) all.add(part_of(i));
    return all;
}

// The sum of units that come from the left, first of each part of 1 << part_log2 of them.
template <class Config>
class UnitFold {
  public:
    __device__ explicit UnitFold(int32_t part_log2) : part_log2_(part_log2) {}

    __device__ void add(int32_t unit, const RowSum<Config>& sum) {
        const int32_t last = (1 << part_log2_) - 1, in_part = unit & last;
        if (in_part == 0) {
            part_ = sum;
        } else {
            part_.add(sum);
        }
        if (in_part < last) return;
        if (unit == last) {
            all_ = part_;
        } else {
            all_.add(part_);
        }
    }
    __device__ const RowSum<Config>& sum() const { return all_; }  // after the last unit of a part

  private:
    int32_t part_log2_;
    RowSum<Config> part_, all_;
};

}  // namespace octavo::cuda
