// Row tiles whose keys are cut into splits (Flash-Decoding): the scheduler hands out each split by itself,
// and the warpgroup that finishes last combines the splits, in their order, so that the same call gives the
// same bits.
#pragma once

#include "common/online_softmax.h"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90_attention/shared.cuh"
#include "cuda/tile/softmax.cuh"

namespace octavo::cuda {

// One warpgroup's partial result for one split, in the workspace: what its threads hold of the result,
// register by register, and the softmax states of its rows. Warps without a query write nothing.
template <class Config>
class Sm90Split {
  public:
    static constexpr int kFloats = Config::kGroupRows * (Config::kValueDim + 2);
    static constexpr int kOut = Config::kValueDim / 2;

    // `num_rows`: how many of the warpgroup's 64 rows hold a query.
    __device__ Sm90Split(const Sm90Launch& plan, const Sm90Work& work, int group, int num_rows)
        : plan_(plan),
          split_(work.split()),
          num_splits_(work.num_splits()),
          first_(work.first_split()),
          group_(group),
          thread_(threadIdx.x % 128),
          any_(num_rows > 0),
          used_(thread_ / 32 * 16 < num_rows) {}

    __device__ void put_state(int row, const SoftmaxState& state) const {
        if (used_ && thread_ % 4 == 0)
            __stcg(states(split_) + row, make_float2(state.sum > 0.0f ? state.max : -INFINITY, state.sum));
    }

    // Call it after put_state: it writes the result too, and returns whether this split is the last one to
    // arrive. In that case `out` and `state` (of this thread's two rows) become the combination of all
    // splits. All threads of the warpgroup call this together, with a named barrier and a word in shared
    // memory that nobody else uses.
    __device__ __forceinline__ bool add_up(float (&out)[kOut], const int32_t (&rows)[2],
                                           SoftmaxState (&state)[2], int barrier, uint32_t* is_last) const {
        if (!any_) return false;
#pragma unroll
        for (int i = 0; used_ && i < kOut / 4; ++i) {
            __stcg(result(split_) + 128 * i,
                   make_float4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]));
        }
        ptx::named_barrier_sync(barrier, 128);
        if (thread_ == 0) *is_last = arrive();
        ptx::named_barrier_sync(barrier, 128);
        if (!*is_last) return false;
        if (!used_) return true;

        // The four lanes that share a row take turns in reading its states.
        constexpr int kEach = kMaxSm90Splits / 4;
        SoftmaxState parts[kEach][2];
#pragma unroll
        for (int i = 0; i < kEach; ++i) load_states(parts[i], thread_ % 4 + 4 * i, rows);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float max = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kEach; ++i) max = fmaxf(max, parts[i][half].max);
            state[half].max = row_max(max);
#pragma unroll
            for (int i = 0; i < kEach; ++i) sum += parts[i][half].sum * weight(parts[i][half], state[half]);
            state[half].sum = row_sum(sum);
        }
#pragma unroll
        for (int begin = 0; begin < kOut; begin += kColumns) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) out[begin + i] = 0.0f;
#pragma unroll 1
            for (int first = 0; first < num_splits_; first += kAtOnce)
                add_parts(out, begin, first, rows, state);
        }
        return true;
    }

  private:
    // How many splits and columns are loaded together: as many as registers allow.
    static constexpr int kAtOnce = Config::kValueDim <= 128 && Config::kConsumers <= 2 ? 4 : 2;
    static constexpr int kColumns = Config::kConsumers <= 2 ? 32 : 16;

    __device__ bool arrive() const {
        const uint32_t last = num_splits_ - 1;
        uint32_t arrived;
        // Releases what this warpgroup wrote, and acquires what the others wrote. The counter wraps to zero
        // with the last split.
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(arrived)
                     : "l"(plan_.arrivals + first_ * plan_.split_blocks + group_), "r"(last)
                     : "memory");
        return arrived == last;
    }

    __device__ static float weight(const SoftmaxState& part, const SoftmaxState& all) {
        return ptx::exp2_approx(part.max - all.safe_max());
    }

    __device__ __forceinline__ void add_parts(float (&out)[kOut], int begin, int first,
                                              const int32_t (&rows)[2], const SoftmaxState (&all)[2]) const {
        float4 results[kAtOnce][kColumns / 4];
        SoftmaxState parts[kAtOnce][2];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            load_states(parts[j], first + j, rows);
#pragma unroll
            for (int i = 0; i < kColumns / 4; ++i) {
                results[j][i] =
                    first + j < num_splits_ ? __ldcg(result(first + j) + 128 * (begin / 4 + i)) : float4{};
            }
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const float weights[2] = {weight(parts[j][0], all[0]), weight(parts[j][1], all[1])};
#pragma unroll
            for (int i = 0; i < kColumns / 4; ++i) {
                float* const to = &out[begin + 4 * i];
                to[0] += results[j][i].x * weights[0];
                to[1] += results[j][i].y * weights[0];
                to[2] += results[j][i].z * weights[1];
                to[3] += results[j][i].w * weights[1];
            }
        }
    }

    // States past the last split are empty. They are set here, since nvcc 13.0 gives the default values of
    // SoftmaxState only to the first element of an array of arrays, and zeros to the others.
    __device__ __forceinline__ void load_states(SoftmaxState (&state)[2], int split,
                                                const int32_t (&rows)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            state[half] = {-INFINITY, 0.0f};
            if (split >= num_splits_) continue;
            const float2 loaded = __ldcg(states(split) + rows[half]);
            state[half] = {loaded.x, loaded.y};
        }
    }
    __device__ float* place(int32_t split) const {
        return plan_.partial + (int64_t{first_ + split} * plan_.split_blocks + group_) * kFloats;
    }
    __device__ float4* result(int32_t split) const {
        return reinterpret_cast<float4*>(place(split)) + thread_;
    }
    __device__ float2* states(int32_t split) const {
        return reinterpret_cast<float2*>(place(split) + Config::kGroupRows * Config::kValueDim);
    }

    const Sm90Launch& plan_;
    const int32_t split_, num_splits_;  // this one's number among those of the row tile
    const int32_t first_;               // the place of the row tile's first one
    const int group_, thread_;
    const bool any_, used_;  // whether the warpgroup has queries, and whether the warp has
};

}  // namespace octavo::cuda
