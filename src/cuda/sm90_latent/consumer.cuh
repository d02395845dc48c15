// The consumers: two warpgroups that multiply. Both see all 64 rows; each makes the scores of every other
// tile of keys, and owns half of the columns of the results (the schedule is in kernel.cuh).
#pragma once

#include "common/online_softmax.h"
#include "cuda/ptx/cluster.h"
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
template <class T, bool kIsFp8, int kWarpgroup>
class Sm90LatentConsumer {
  public:
    __device__ Sm90LatentConsumer(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  Sm90LatentShared& shared, const Sm90LatentWork& work)
        : p_(p), launch_(launch), shared_(shared), work_(work) {
#pragma unroll
        for (int i = 0; i < 2; ++i) end_keys_[i] = work.end_key_of(p, launch, work.first_row + row(i));
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            scale_log2_[i] = p.softmax_scale * kLog2e;
            if constexpr (kIsFp8) scale_log2_[i] *= shared.query_unit[row(i)];
        }
    }

    __device__ void run() {
        for (int32_t pair = 0; pair < work_.num_tiles / 2; ++pair) multiply_pair<true>(pair);
        if (work_.num_tiles % 2 != 0) multiply_pair<false>(work_.num_tiles / 2);
        finish();
    }

  private:
    using Number = Sm90LatentNumber<T, kIsFp8>;
    using Block = Sm90LatentShared::Block;
    static constexpr int kBlocks = Sm90LatentShared::kBlocks, kHalfBlocks = Sm90LatentShared::kHalfBlocks;
    static constexpr int kOther = 1 - kWarpgroup;

    // A thread has two rows of the accumulators (wgmma.h).
    __device__ static int row(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i; }

    template <bool kHasOdd>
    __device__ void multiply_pair(int32_t pair) {
        if constexpr (kWarpgroup == 0)
            even_tile<kHasOdd>(pair);
        else
            odd_tile<kHasOdd>(pair);
    }

    template <bool kHasOdd>
    __device__ void even_tile(int32_t pair) {
        multiply_keys(pair);
        zero_unseen(2 * pair);
        mask(2 * pair);
        float max[2], factor[2];
        highest(max);
        // All warps have multiplied the rotary part, where weights come to lie.
        ptx::named_barrier_sync(kOfWarpgroup + kWarpgroup, 128);
        raise_max(max, factor);
        scale_sums(factor);
        weigh();
        hand_over_weights();
        ptx::named_barrier_arrive(kWeightsOfEven, 256);
        scale_out(factor);
        multiply_own_values();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(out_);
        release(0, 0);
        if constexpr (kHasOdd) {
            ptx::named_barrier_sync(kWeightsOfOdd, 256);
            take_max(factor);
            scale_sums(factor);
            scale_out(factor);
            multiply_others_values(pair);
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(out_);
            release(1, 0);
        }
    }

    template <bool kHasOdd>
    __device__ void odd_tile(int32_t pair) {
        float max[2], factor[2];
        if constexpr (kHasOdd) {
            multiply_keys(pair);
            zero_unseen(2 * pair + 1);
            mask(2 * pair + 1);
            highest(max);
        }
        ptx::named_barrier_sync(kWeightsOfEven, 256);
        take_max(factor);
        scale_sums(factor);
        scale_out(factor);
        multiply_others_values(pair);
        if constexpr (kHasOdd) {  // while the tensor cores multiply the values of the even tile
            raise_max(max, factor);
            scale_sums(factor);
            weigh();
            hand_over_weights();
            ptx::named_barrier_arrive(kWeightsOfOdd, 256);
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(out_);
        release(0, 1);
        if constexpr (kHasOdd) {
            scale_out(factor);
            multiply_own_values();
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(out_);
            release(1, 1);
        }
    }

    // Computes the scores of this warpgroup's tile. Its own half of the columns is multiplied first, since
    // that half arrives first.
    __device__ void multiply_keys(int32_t pair) {
        const auto parity = static_cast<uint32_t>(pair & 1);
        auto multiply_block = [&](int block, bool accumulate) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint64_t a = descriptor(&shared_.q[0], 0, block, 32 * k);
                const uint64_t b = descriptor(&shared_.keys[kWarpgroup][0], 0, block, 32 * k);
                ptx::Wgmma<Number, 64>::ss(scores_, a, b, accumulate || k > 0);
            }
        };
        wait_for_keys(kWarpgroup, parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kHalfBlocks; ++i) multiply_block(kWarpgroup * kHalfBlocks + i, i > 0);
        ptx::wgmma_commit();
        wait_for_keys(kOther, parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kHalfBlocks; ++i) multiply_block(kOther * kHalfBlocks + i, true);
        multiply_block(kBlocks - 1, true);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(scores_);
    }

    // Waits for half of this warpgroup's tile. What threads have converted needs a fence before wgmma reads
    // it, on the other warpgroup's behalf, too. The converter would have to wait there for all of its loads.
    __device__ void wait_for_keys(int half, uint32_t parity) {
        ptx::mbarrier_wait(&shared_.full[kWarpgroup][half], parity);
        if constexpr (kIsFp8) ptx::fence_proxy_async();
    }

    // Zeroes the values of keys behind the last one, which may hold any number: 0 x NaN would spoil the sums.
    // The converter has written zeros there.
    __device__ void zero_unseen(int32_t i) {
        if constexpr (kIsFp8) return;
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
            max[i] = fmaxf(max[i], __shfl_xor_sync(~0u, max[i], 2)) * scale_log2(i);
        }
    }

    __device__ float scale_log2(int i) const { return scale_log2_[kUnits == 1 ? 0 : i]; }

    // Raises the maximum of each row to that of this warpgroup's tile, and tells the other warpgroup.
    __device__ void raise_max(const float (&max)[2], float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float raised = fmaxf(max[i], max_[i]);
            factor[i] = factor_of(max_[i], raised);
            max_[i] = raised;
            if (threadIdx.x % 4 != 0) continue;
            shared_.max[kWarpgroup][row(i)] = raised;
            shared_.factor[kWarpgroup][row(i)] = factor[i];
        }
    }
    // Takes over what the other warpgroup has raised.
    __device__ void take_max(float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            max_[i] = shared_.max[kOther][row(i)];
            factor[i] = shared_.factor[kOther][row(i)];
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
            scores_[j] = ptx::exp2_approx(fmaf(scores_[j], scale_log2(j / 2 % 2), -max[j / 2 % 2]));
            sums_[j / 2 % 2] += scores_[j];
        }
#pragma unroll
        for (int j = 0; j < 16; ++j) weights_[j] = pack<Number>(scores_[2 * j], scores_[2 * j + 1]);
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

    // Puts this tile's weights into shared memory, for the other warpgroup.
    __device__ void hand_over_weights() {
        const int lane = threadIdx.x % 32, matrix = lane / 8;
        const int r = threadIdx.x % 128 / 32 * 16 + lane % 8 + 8 * (matrix % 2);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int chunk = (2 * k + matrix / 2) ^ (r % 8);
            ptx::stmatrix_x4(&shared_.weights(kWarpgroup).rows[r][16 * chunk], weights_[4 * k],
                             weights_[4 * k + 1], weights_[4 * k + 2], weights_[4 * k + 3]);
        }
        ptx::fence_proxy_async();
    }

    // The descriptor of what lies `bytes` behind the start of a block, counted from block `first` on. It is
    // that of `first` plus a constant. If each were made of an address, that would take as long as a product
    // of 64 columns.
    __device__ static uint64_t descriptor(const Block* first, uint32_t column_block_bytes, int block,
                                          int bytes) {
        return ptx::wgmma_descriptor(ptx::shared_address(first), column_block_bytes) +
               ((block * sizeof(Block) + bytes) >> 4);
    }
    // The descriptor of this warpgroup's columns of a tile's values, for 16 keys from key 16 k on.
    __device__ uint64_t values(int tile, int k) {
        return descriptor(&shared_.keys[tile][0], sizeof(Block), kWarpgroup * kHalfBlocks, 16 * 128 * k);
    }
    __device__ void multiply_own_values() {
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            ptx::Wgmma<Number, 256>::rs(out_, weights_ + 4 * k, values(kWarpgroup, k));
        ptx::wgmma_commit();
    }
    __device__ void multiply_others_values(int32_t pair) {
        ptx::mbarrier_wait(&shared_.full[kOther][kWarpgroup], static_cast<uint32_t>(pair & 1));
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint64_t a = descriptor(&shared_.weights(kOther), 0, 0, 32 * k);
            ptx::Wgmma<Number, 256>::ss_values(out_, a, values(kOther, k));
        }
        ptx::wgmma_commit();
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
        SoftmaxState states[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) states[i] = {max_[i], shared_.sum[0][row(i)] + shared_.sum[1][row(i)]};
        if (launch_.cluster > 1 && !combine_with_peer(states)) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) store_row(i, states[i]);
    }

    // Combines the results with those of the other CTA of the cluster, which has other keys. CTA w of it gets
    // those of both warpgroups w; true there.
    __device__ bool combine_with_peer(SoftmaxState (&states)[2]) {
        const auto rank = static_cast<int>(ptx::cluster_rank());
        static_assert(sizeof(shared_.keys) >= 128 * sizeof(out_));
        auto* const peers = reinterpret_cast<float4*>(&shared_.keys) + threadIdx.x % 128;
        ptx::cluster_barrier();  // both have multiplied their last keys
        const bool has_rows = work_.first_row + row(0) / 16 * 16 < work_.num_rows;  // this warp
        if (rank != kWarpgroup && has_rows) {
            const uint32_t to = ptx::cluster_address(ptx::shared_address(peers), kWarpgroup);
#pragma unroll
            for (int j = 0; j < 32; ++j)
                ptx::store_cluster_float4(
                    to + j * 128 * sizeof(float4),
                    make_float4(out_[4 * j], out_[4 * j + 1], out_[4 * j + 2], out_[4 * j + 3]));
            const uint32_t state = ptx::cluster_address(ptx::shared_address(shared_.peer_state), kWarpgroup);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (threadIdx.x % 4 == 0)
                    ptx::store_cluster_float2(state + row(i) * sizeof(float2),
                                              make_float2(states[i].max, states[i].sum));
            }
        }
        ptx::cluster_barrier();  // results have arrived
        if (rank != kWarpgroup || !has_rows) return false;
        float factors[2], peer_factors[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 peer = shared_.peer_state[row(i)];
            const float max = fmaxf(states[i].max, peer.x);
            factors[i] = factor_of(states[i].max, max);
            peer_factors[i] = factor_of(peer.x, max);
            states[i] = {max, states[i].sum * factors[i] + peer.y * peer_factors[i]};
        }
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            const float4 peer = peers[128 * j];
            const float of_peer[4] = {peer.x, peer.y, peer.z, peer.w};
#pragma unroll
            for (int k = 0; k < 4; ++k)
                out_[4 * j + k] = out_[4 * j + k] * factors[k / 2] + of_peer[k] * peer_factors[k / 2];
        }
        return true;
    }

    __device__ void store_row(int i, const SoftmaxState& state) {
        const int32_t r = work_.first_row + row(i);
        if (r >= work_.num_rows) return;
        const float inverse = state.inverse_sum();
        const int64_t token = work_.sequence.first_q + launch_.num_q_heads.quotient(r);
        const int64_t head = launch_.num_q_heads.remainder(r);
        const int column = kWarpgroup * kLatentVDim / 2 + 2 * static_cast<int>(threadIdx.x % 4);
        const bool writes_lse = kWarpgroup == 0 && threadIdx.x % 4 == 0;
        if (launch_.num_partials > 1) {
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
    static constexpr int kUnits = kIsFp8 ? 2 : 1;
    float scale_log2_[kUnits];
    int32_t end_keys_[2];
    float scores_[32];
    uint32_t weights_[16];
    float max_[2] = {-INFINITY, -INFINITY}, sums_[2] = {0.0f, 0.0f};
    float out_[128] = {};
};

}  // namespace octavo::cuda
