// The consumers: two warpgroups that multiply. Both see all 64 rows; each makes the scores of every other
// tile of keys, and owns half of the columns of the results (the schedule is in kernel.cuh).
#pragma once

#include "common/online_softmax.h"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/types.h"

#include <cstdint>

namespace octavo::cuda {

// One of the two consumer warpgroups.
template <class T, int kWarpgroup>
class Sm90LatentConsumer {
  public:
    __device__ Sm90LatentConsumer(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  Sm90LatentShared& shared, const Sm90LatentWork& work)
        : p_(p), launch_(launch), shared_(shared), work_(work), scale_log2_(p.softmax_scale * kLog2e) {
#pragma unroll
        for (int i = 0; i < 2; ++i) end_keys_[i] = work.end_key_of(p, launch, work.first_row + row(i));
    }

    __device__ void run() {
        for (int32_t pair = 0; 2 * pair < work_.num_tiles; ++pair) {
            const bool has_odd = 2 * pair + 1 < work_.num_tiles;
            if constexpr (kWarpgroup == 0)
                even_tile(pair, has_odd);
            else
                odd_tile(pair, has_odd);
        }
        finish();
    }

  private:
    using Block = Sm90LatentShared::Block;
    static constexpr int kBlocks = Sm90LatentShared::kBlocks, kHalfBlocks = Sm90LatentShared::kHalfBlocks;
    static constexpr int kOther = 1 - kWarpgroup;

    // A thread has two rows of the accumulators (wgmma.h).
    __device__ static int row(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i; }

    __device__ void even_tile(int32_t pair, bool has_odd) {
        multiply_keys(pair);
        zero_unseen(2 * pair);
        mask(2 * pair);
        float max[2], factor[2];
        highest(max);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            max[i] = fmaxf(max[i], max_[i]);
            factor[i] = factor_of(max_[i], max[i]);
            max_[i] = max[i];
            if (threadIdx.x % 4 == 0) {
                shared_.max[row(i)] = max[i];
                shared_.factor[0][row(i)] = factor[i];
            }
        }
        ptx::named_barrier_arrive(kMaxOfEven, 256);
        scale(factor);
        weigh();
        multiply_own_values();
        release(0, 0);
        ptx::named_barrier_sync(kWeightsOfOdd, 256);  // all warps have multiplied the keys, too
        if (has_odd) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                max_[i] = shared_.max[row(i)];
                factor[i] = shared_.factor[1][row(i)];
            }
            scale_weights(factor);
            hand_over_weights();
            ptx::named_barrier_arrive(kWeightsOfEven, 256);
            scale(factor);
            multiply_others_values(pair);
            release(1, 0);
        } else {
            hand_over_weights();
            ptx::named_barrier_arrive(kWeightsOfEven, 256);
        }
    }

    __device__ void odd_tile(int32_t pair, bool has_odd) {
        float max[2], factor[2];
        if (has_odd) {
            multiply_keys(pair);
            zero_unseen(2 * pair + 1);
            mask(2 * pair + 1);
            highest(max);
        }
        ptx::named_barrier_sync(kMaxOfEven, 256);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            max_[i] = shared_.max[row(i)];
            factor[i] = shared_.factor[0][row(i)];
        }
        if (has_odd) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                max[i] = fmaxf(max[i], max_[i]);
                const float of_odd = factor_of(max_[i], max[i]);
                max_[i] = max[i];
                factor[i] *= of_odd;
                if (threadIdx.x % 4 == 0) shared_.factor[1][row(i)] = of_odd;
            }
            __syncwarp();  // all lanes of a row have read its maximum
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (threadIdx.x % 4 == 0) shared_.max[row(i)] = max[i];
            }
            scale_sums(factor);
            weigh();
            hand_over_weights();
            ptx::named_barrier_arrive(kWeightsOfOdd, 256);
            scale_out(factor);
            multiply_own_values();
            release(1, 1);
        } else {
            ptx::named_barrier_arrive(kWeightsOfOdd, 256);
            scale(factor);
        }
        ptx::named_barrier_sync(kWeightsOfEven, 256);
        multiply_others_values(pair);
        release(0, 1);
    }

    // Computes the scores of this warpgroup's tile. Its own half of the columns is multiplied first, since
    // that half arrives first.
    __device__ void multiply_keys(int32_t pair) {
        const auto parity = static_cast<uint32_t>(pair & 1);
        auto multiply_block = [&](int block, bool accumulate) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint64_t a = ptx::wgmma_descriptor(ptx::shared_address(&shared_.q[block]) + 32 * k, 1);
                const uint64_t b =
                    ptx::wgmma_descriptor(ptx::shared_address(&shared_.keys[kWarpgroup][block]) + 32 * k, 1);
                ptx::Wgmma<T, 64>::ss(scores_, a, b, accumulate || k > 0);
            }
        };
        ptx::mbarrier_wait(&shared_.full[kWarpgroup][kWarpgroup], parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kHalfBlocks; ++i) multiply_block(kWarpgroup * kHalfBlocks + i, i > 0);
        ptx::wgmma_commit();
        ptx::mbarrier_wait(&shared_.full[kWarpgroup][kOther], parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kHalfBlocks; ++i) multiply_block(kOther * kHalfBlocks + i, true);
        multiply_block(kBlocks - 1, true);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(scores_);
    }

    // Zeroes the values of keys behind the last one, which may hold any number: 0 x NaN would spoil the sums.
    __device__ void zero_unseen(int32_t i) {
        const int32_t keys = work_.keys_of(i);
        if (keys >= kSm90LatentKeys) return;
        constexpr int kChunks = 2 * kHalfBlocks * 8;  // pieces of 16 bytes in a row
        for (int c = threadIdx.x % 128; c < (kSm90LatentKeys - keys) * kChunks; c += 128) {
            const int key = keys + c / kChunks, chunk = c % kChunks;
            *reinterpret_cast<uint4*>(&shared_.keys[kWarpgroup][chunk / 8].rows[key][chunk % 8 * 16]) =
                make_uint4(0, 0, 0, 0);
        }
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(kOfWarpgroup + kWarpgroup, 128);
    }

    __device__ void mask(int32_t i) {
        const int32_t first =
            (work_.begin_tile + i) * kSm90LatentKeys + 2 * static_cast<int>(threadIdx.x % 4);
        if (__all_sync(~0u, first + kSm90LatentKeys <= min(end_keys_[0], end_keys_[1]))) return;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            if (first + 8 * (j / 4) + j % 2 >= end_keys_[j / 2 % 2]) scores_[j] = -INFINITY;
        }
    }

    // Finds the highest score of each row, in units of log2(e).
    __device__ void highest(float (&max)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            max[i] = -INFINITY;
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                if (j / 2 % 2 == i) max[i] = fmaxf(max[i], scores_[j]);
            }
            max[i] = fmaxf(max[i], __shfl_xor_sync(~0u, max[i], 1));
            max[i] = fmaxf(max[i], __shfl_xor_sync(~0u, max[i], 2)) * scale_log2_;
        }
    }

    __device__ static float safe(float max) { return max == -INFINITY ? 0.0f : max; }
    __device__ static float factor_of(float before, float after) {
        return ptx::exp2_approx(before - safe(after));
    }

    // Turns scores into weights, and adds these to the sums of the rows.
    __device__ void weigh() {
        const float max[2] = {safe(max_[0]), safe(max_[1])};
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            scores_[j] = ptx::exp2_approx(fmaf(scores_[j], scale_log2_, -max[j / 2 % 2]));
            sums_[j / 2 % 2] += scores_[j];
        }
        pack_weights();
    }
    __device__ void pack_weights() {
#pragma unroll
        for (int j = 0; j < 16; ++j) weights_[j] = pack<T>(scores_[2 * j], scores_[2 * j + 1]);
    }
    __device__ void scale_weights(const float (&factor)[2]) {
        if (are_ones(factor)) return;
#pragma unroll
        for (int j = 0; j < 32; ++j) scores_[j] *= factor[j / 2 % 2];
        pack_weights();
    }

    __device__ static bool are_ones(const float (&factor)[2]) {
        return __all_sync(~0u, factor[0] == 1.0f && factor[1] == 1.0f);
    }
    __device__ void scale_sums(const float (&factor)[2]) {
        sums_[0] *= factor[0];
        sums_[1] *= factor[1];
    }
    __device__ void scale_out(const float (&factor)[2]) {
        if (are_ones(factor)) return;
#pragma unroll
        for (int j = 0; j < 128; ++j) out_[j] *= factor[j / 2 % 2];
    }
    __device__ void scale(const float (&factor)[2]) {
        scale_sums(factor);
        scale_out(factor);
    }

    // Puts this tile's weights in the place of its rotary part, for the other warpgroup.
    __device__ void hand_over_weights() {
        const int lane = threadIdx.x % 32, matrix = lane / 8;
        const int r = threadIdx.x % 128 / 32 * 16 + lane % 8 + 8 * (matrix % 2);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int chunk = (2 * k + matrix / 2) ^ (r % 8);
            ptx::stmatrix_x4(&shared_.rotary(kWarpgroup).rows[r][16 * chunk], weights_[4 * k],
                             weights_[4 * k + 1], weights_[4 * k + 2], weights_[4 * k + 3]);
        }
        ptx::fence_proxy_async();
    }

    // The descriptor of this warpgroup's columns of a tile's values, for 16 keys from key 16 k on.
    __device__ uint64_t values(int tile, int k) {
        return ptx::wgmma_descriptor(
            ptx::shared_address(&shared_.keys[tile][kWarpgroup * kHalfBlocks]) + 16 * 128 * k, sizeof(Block));
    }
    __device__ void multiply_own_values() {
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::Wgmma<T, 256>::rs(out_, weights_ + 4 * k, values(kWarpgroup, k));
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(out_);
    }
    __device__ void multiply_others_values(int32_t pair) {
        ptx::mbarrier_wait(&shared_.full[kOther][kWarpgroup], static_cast<uint32_t>(pair & 1));
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint64_t a =
                ptx::wgmma_descriptor(ptx::shared_address(&shared_.rotary(kOther)) + 32 * k, 1);
            ptx::Wgmma<T, 256>::ss_values(out_, a, values(kOther, k));
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(out_);
    }

    // Tells the producer that this warp is done with half a tile.
    __device__ void release(int tile, int half) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared_.empty[tile][half]);
    }

    __device__ void finish() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sums_[i] += __shfl_xor_sync(~0u, sums_[i], 1);
            sums_[i] += __shfl_xor_sync(~0u, sums_[i], 2);
            if (threadIdx.x % 4 == 0) shared_.sum[kWarpgroup][row(i)] = sums_[i];
        }
        ptx::named_barrier_sync(kSums, 256);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const SoftmaxState state{max_[i], shared_.sum[0][row(i)] + shared_.sum[1][row(i)]};
            store_row(i, state);
        }
    }

    __device__ void store_row(int i, const SoftmaxState& state) {
        const int32_t r = work_.first_row + row(i);
        if (r >= work_.num_rows) return;
        const float inverse = state.inverse_sum();
        const int64_t token = work_.sequence.first_q + launch_.num_q_heads.quotient(r);
        const int64_t head = launch_.num_q_heads.remainder(r);
        const int column = kWarpgroup * kLatentVDim / 2 + 2 * static_cast<int>(threadIdx.x % 4);
        const bool writes_lse = kWarpgroup == 0 && threadIdx.x % 4 == 0;
        if (launch_.num_splits > 1) {
            const int64_t total_rows = p_.total_q * p_.num_q_heads;
            const int64_t partial = blockIdx.y * total_rows + token * p_.num_q_heads + head;
            float* const to = launch_.partial_out + partial * kLatentVDim + column;
#pragma unroll
            for (int j = 0; j < 32; ++j)
                *reinterpret_cast<float2*>(to + 8 * j) =
                    make_float2(out_[4 * j + 2 * i] * inverse, out_[4 * j + 2 * i + 1] * inverse);
            if (writes_lse) launch_.partial_lse[partial] = state.lse();
            return;
        }
        T* const to =
            static_cast<T*>(p_.out) + token * p_.out_token_stride + head * p_.out_head_stride + column;
        const float scale = inverse * p_.out_scale;
#pragma unroll
        for (int j = 0; j < 32; ++j)
            *reinterpret_cast<uint32_t*>(to + 8 * j) =
                pack<T>(out_[4 * j + 2 * i] * scale, out_[4 * j + 2 * i + 1] * scale);
        if (writes_lse && p_.lse)
            p_.lse[token * p_.lse_token_stride + head * p_.lse_head_stride] = state.lse();
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    Sm90LatentShared& shared_;
    const Sm90LatentWork& work_;
    float scale_log2_;
    int32_t end_keys_[2];
    float scores_[32];  // scores, then the weights that are made of them
    uint32_t weights_[16];
    float max_[2] = {-INFINITY, -INFINITY}, sums_[2] = {0.0f, 0.0f};
    float out_[128] = {};
};

}  // namespace octavo::cuda
