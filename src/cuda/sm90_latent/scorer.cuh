// The scorer: a warpgroup that multiplies queries with keys, and makes weights of the scores.
#pragma once

#include "common/online_softmax.h"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90_latent/results.cuh"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/sm90_latent/work.cuh"
#include "cuda/types.h"

#include <cstdint>

namespace octavo::cuda {

// All of its 184 registers are in use: 124 hold queries, 32 scores. What is seldom needed is computed anew.
template <class T>
class Sm90LatentScorer {
  public:
    __device__ Sm90LatentScorer(const LatentAttentionParams& p, const LatentLaunch& launch,
                                Sm90LatentShared& shared, const Sm90LatentWork& work)
        : p_(p),
          launch_(launch),
          shared_(shared),
          num_tiles_(work.num_tiles),
          num_whole_tiles_(work.end_key_of(p, launch, work.first_row) / kSm90LatentKeys - work.begin_tile) {}

    __device__ void run() {
        read_queries();
        for (int32_t i = 0; i < num_tiles_; ++i) {
            multiply_keys(i);
            if (i >= num_whole_tiles_) mask(i);
            make_weights(stage_of(i));
        }
        if (num_tiles_ > 0) hand_over_weights(num_tiles_ - 1);
        finish();
    }

  private:
    static constexpr int kHalfSteps = kLatentVDim / 32;     // of 16 columns
    static constexpr int kQuerySteps = 2 * kHalfSteps - 1;  // for which registers hold queries

    __device__ static int stage_of(int32_t i) { return i % kSm90LatentStages; }
    __device__ static uint32_t parity_of(int32_t i) { return i / kSm90LatentStages & 1; }

    // The thread's index, out of which the compiler is not to make numbers that it keeps in registers.
    __device__ static unsigned thread() {
        unsigned index;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
        return index;
    }
    // As sm90_latent_row.
    __device__ static int row(int i) { return thread() % 128 / 32 * 16 + thread() % 32 / 4 + 8 * i; }

    __device__ void read_queries() {
        ptx::named_barrier_sync(kQueries, kSm90LatentThreads);
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
        for (int step = 0; step < kQuerySteps; ++step) {
            const int chunk = (step % 4 * 2 + lane / 16) ^ (row % 8);
            ptx::ldmatrix_x4(queries_[step],
                             ptx::shared_address(&shared_.queries(step / 4).rows[row][16 * chunk]));
        }
        __syncwarp();
        if (lane == 0) {
            for (uint64_t& empty : shared_.empty[kSm90LatentStages - 1]) ptx::mbarrier_arrive(&empty);
        }
    }

    // Computes the scores of the i-th tile. The weights of the tile before are handed over when these
    // products are nearly done, so that its values are multiplied while the next weights are made; but at
    // once if the multipliers would have to wait for these keys.
    __device__ void multiply_keys(int32_t i) {
        uint64_t* const full = shared_.full[stage_of(i)];
        const uint32_t parity = parity_of(i);
        bool has_weights = i > 0;
        if (has_weights &&
            !__all_sync(~0u, ptx::mbarrier_test(&full[0], parity) && ptx::mbarrier_test(&full[1], parity))) {
            hand_over_weights(i - 1);
            has_weights = false;
        }
        const uint32_t keys = ptx::shared_address(&shared_.keys[stage_of(i)]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            ptx::mbarrier_wait(&full[half], parity);
            ptx::wgmma_fence();
#pragma unroll
            for (int step = half * kHalfSteps; step < (half + 1) * kHalfSteps; ++step) multiply(step, keys);
        }
        ptx::wgmma_commit();
#pragma unroll
        for (int step = 2 * kHalfSteps; step < kLatentQkDim / 16; ++step) multiply(step, keys);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        if (has_weights) hand_over_weights(i - 1);
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(scores_);
    }
    __device__ __forceinline__ void multiply(int step, uint32_t keys_of_tile) {
        const auto block = static_cast<uint32_t>(step / 4 * sizeof(Sm90LatentBlock) + step % 4 * 32);
        const uint64_t keys = ptx::wgmma_descriptor(keys_of_tile + block, 1);
        if (step < kQuerySteps) {
            ptx::Wgmma<T, 64>::rs_keys(scores_, queries_[step], keys, step > 0);
        } else if (step == kQuerySteps) {
            const uint32_t pieces = ptx::shared_address(&shared_.last_queries);
            ptx::Wgmma<T, 64>::ss(scores_, ptx::wgmma_descriptor_pieces(pieces, 64 * 16), keys, true);
        } else {
            const uint32_t rotary = ptx::shared_address(&shared_.rotary_queries);
            ptx::Wgmma<T, 64>::ss(scores_, ptx::wgmma_descriptor(rotary + step % 4 * 32, 1), keys, true);
        }
    }

    // Hides keys from rows. Zeroes the values of keys behind the last one, which may hold any number: 0 x NaN
    // would spoil the sums.
    __device__ void mask(int32_t i) {
        const Sm90LatentWork work = Sm90LatentWork::make(p_, launch_);
        const int32_t keys = work.keys_of(i);
        constexpr int kChunks = kLatentVDim / 8;  // pieces of 16 bytes in a row
        for (int c = thread() % 128; c < (kSm90LatentKeys - keys) * kChunks; c += 128) {
            const int key = keys + c / kChunks, chunk = c % kChunks;
            *reinterpret_cast<uint4*>(&shared_.keys[stage_of(i)][chunk / 8].rows[key][chunk % 8 * 16]) =
                make_uint4(0, 0, 0, 0);
        }
        const int32_t first = (work.begin_tile + i) * kSm90LatentKeys + 2 * static_cast<int>(thread() % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int32_t end = work.end_key_of(p_, launch_, work.first_row + row(r));
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                if (j / 2 % 2 == r && first + 8 * (j / 4) + j % 2 >= end) scores_[j] = -INFINITY;
            }
        }
    }

    // Makes weights of the scores, with the maximum of each row so far, and puts them into shared memory.
    __device__ void make_weights(int stage) {
        const float scale_log2 = p_.softmax_scale * kLog2e;
        float max[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float raised = fmaxf(max_[i], highest(i) * scale_log2);
            const float factor = latent_factor(max_[i], raised);
            max_[i] = raised;
            max[i] = safe_max(raised);
            sums_[i] *= factor;
            if (thread() % 4 == 0) shared_.factor[stage][row(i)] = factor;
        }
        // All warps have multiplied the rotary part, where weights come to lie.
        ptx::named_barrier_sync(kOfWarpgroup, 128);
        const int lane = thread() % 32, matrix = lane / 8;
        const int r = thread() % 128 / 32 * 16 + lane % 8 + 8 * (matrix % 2);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint32_t weights[4];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float& x = scores_[8 * k + j];
                x = ptx::exp2_approx(fmaf(x, scale_log2, -max[j / 2 % 2]));
                sums_[j / 2 % 2] += x;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
                weights[j] = pack<T>(scores_[8 * k + 2 * j], scores_[8 * k + 2 * j + 1]);
            const int chunk = (2 * k + matrix / 2) ^ (r % 8);
            ptx::stmatrix_x4(&shared_.weights(stage).rows[r][16 * chunk], weights[0], weights[1], weights[2],
                             weights[3]);
        }
        ptx::fence_proxy_async();
        __syncwarp();
    }
    // Returns the highest score of row i, among four lanes. Pairs first: a chain of 16 would take longer.
    __device__ float highest(int i) const {
        float max[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* const x = scores_ + 8 * j + 2 * i;
            max[j] = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[4], x[5]));
        }
        float result = fmaxf(fmaxf(max[0], max[1]), fmaxf(max[2], max[3]));
        result = fmaxf(result, __shfl_xor_sync(~0u, result, 1));
        return fmaxf(result, __shfl_xor_sync(~0u, result, 2));
    }

    // Each warp arrives for what all of its lanes have written.
    __device__ void hand_over_weights(int32_t i) {
        if (thread() % 32 == 0) ptx::mbarrier_arrive(&shared_.full_weights[stage_of(i)]);
    }

    __device__ void finish() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sums_[i] += __shfl_xor_sync(~0u, sums_[i], 1);
            sums_[i] += __shfl_xor_sync(~0u, sums_[i], 2);
            if (thread() % 4 != 0) continue;
            shared_.sums.max[row(i)] = max_[i];
            shared_.sums.sum[row(i)] = sums_[i];
        }
        ptx::named_barrier_arrive(kSums, kSm90LatentThreads);
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    Sm90LatentShared& shared_;
    int32_t num_tiles_, num_whole_tiles_;  // every row sees all keys of a whole tile
    uint32_t queries_[kQuerySteps][4];
    float scores_[32];
    float max_[2] = {-INFINITY, -INFINITY}, sums_[2] = {0.0f, 0.0f};
};

}  // namespace octavo::cuda
