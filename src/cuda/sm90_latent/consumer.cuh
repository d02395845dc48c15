// The consumers: two warpgroups that multiply. Both see all 64 rows; each makes the scores of every other
// tile of keys, and owns half of the columns of the results (kernel.cuh says who multiplies when).
#pragma once

#include "cuda/ptx/exp2.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90_latent/rows.cuh"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/types.h"

#include <cstdint>

namespace octavo::cuda {

// One of the two consumer warpgroups, for one work.
template <class T, Sm90LatentCache kCache, int kWarpgroup, bool kReleasesQueries>
class Sm90LatentConsumer {
  public:
    __device__ Sm90LatentConsumer(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  Sm90LatentShared& shared, const Sm90LatentWork& work)
        : shared_(shared), work_(work) {
#pragma unroll
        for (int i = 0; i < 2; ++i) end_keys_[i] = work.end_key_of(p, launch, work.first_row + row(i));
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            scale_log2_[i] = p.softmax_scale * kLog2e;
            if constexpr (kIsFp8) scale_log2_[i] *= shared.query_unit[row(i)];
        }
    }

    // Returns the finished rows. `phases` are those of the places of tiles (Sm90LatentPhases).
    __device__ Sm90LatentRows<T, kWarpgroup>& run(Sm90LatentPhases& phases) {
        // The compiler would set the sums to zero before the queries are loaded, for which registers are
        // short then.
        float zero;
        asm volatile("mov.f32 %0, 0f00000000;" : "=f"(zero));
#pragma unroll
        for (float& x : rows_.out) x = zero;
        for (int32_t pair = 0; pair < work_.num_tiles / 2; ++pair) {
            multiply_pair<true>(pair, phases);
            phases.advance(0);
            phases.advance(1);
        }
        if (work_.num_tiles % 2 != 0) {
            multiply_pair<false>(work_.num_tiles / 2, phases);
            phases.advance(0);
        }
        if (work_.num_tiles <= kWarpgroup) release_queries();  // this warpgroup has not used them
        phases.advance_queries();
        finish();
        return rows_;
    }

  private:
    using Number = Sm90LatentNumber<T, kCache>;
    static constexpr bool kIsFp8 = kCache == Sm90LatentCache::fp8;
    static constexpr bool kCopyEngine = kCache == Sm90LatentCache::numbers;  // brings the keys
    using Block = Sm90LatentShared::Block;
    static constexpr int kBlocks = Sm90LatentShared::kBlocks, kHalfBlocks = Sm90LatentShared::kHalfBlocks;
    static constexpr int kOther = 1 - kWarpgroup;

    __device__ static int row(int i) { return Sm90LatentRows<T, kWarpgroup>::row(i); }

    template <bool kHasOdd>
    __device__ void multiply_pair(int32_t pair, const Sm90LatentPhases& phases) {
        if constexpr (kWarpgroup == 0)
            even_tile<kHasOdd>(pair, phases);
        else
            odd_tile<kHasOdd>(pair, phases);
    }

    template <bool kHasOdd>
    __device__ void even_tile(int32_t pair, const Sm90LatentPhases& phases) {
        multiply_keys(2 * pair, phases.of(kWarpgroup));
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
        ptx::wgmma_results(rows_.out);
        release(0, 0);
        if constexpr (kHasOdd) {
            ptx::named_barrier_sync(kWeightsOfOdd, 256);
            take_max(factor);
            scale_sums(factor);
            scale_out(factor);
            multiply_others_values(phases.of(kOther));
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(rows_.out);
            release(1, 0);
        }
    }

    template <bool kHasOdd>
    __device__ void odd_tile(int32_t pair, const Sm90LatentPhases& phases) {
        float max[2], factor[2];
        if constexpr (kHasOdd) {
            multiply_keys(2 * pair + 1, phases.of(kWarpgroup));
            zero_unseen(2 * pair + 1);
            mask(2 * pair + 1);
            highest(max);
        }
        ptx::named_barrier_sync(kWeightsOfEven, 256);
        take_max(factor);
        scale_sums(factor);
        scale_out(factor);
        multiply_others_values(phases.of(kOther));
        if constexpr (kHasOdd) {  // while the tensor cores multiply the values of the even tile
            raise_max(max, factor);
            scale_sums(factor);
            weigh();
            hand_over_weights();
            ptx::named_barrier_arrive(kWeightsOfOdd, 256);
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(rows_.out);
        release(0, 1);
        if constexpr (kHasOdd) {
            scale_out(factor);
            multiply_own_values();
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(rows_.out);
            release(1, 1);
        }
    }

    // Computes the scores of tile i, one of this warpgroup's. Its own half of the columns is multiplied
    // first, since that half arrives first.
    __device__ void multiply_keys(int32_t i, uint32_t parity) {
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
        for (int j = 0; j < kHalfBlocks; ++j) multiply_block(kWarpgroup * kHalfBlocks + j, j > 0);
        ptx::wgmma_commit();
        wait_for_keys(kOther, parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int j = 0; j < kHalfBlocks; ++j) multiply_block(kOther * kHalfBlocks + j, true);
        multiply_block(kBlocks - 1, true);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(scores_);
        if constexpr (kReleasesQueries) {
            if (ptx::uniform(i + 2 >= work_.num_tiles)) release_queries();
        }
    }

    // Tells the warps that copy queries that this warp has multiplied those of the work for the last time.
    __device__ void release_queries() {
        if constexpr (kReleasesQueries) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared_.queries_empty);
        }
    }

    // Waits for half of this warpgroup's tile. What threads have converted or gathered needs a fence before
    // wgmma reads it, on the other warpgroup's behalf, too. They would have to wait there for all of their
    // loads.
    __device__ void wait_for_keys(int half, uint32_t parity) {
        ptx::mbarrier_wait(&shared_.full[kWarpgroup][half], parity);
        if constexpr (!kCopyEngine) ptx::fence_proxy_async();
    }

    // Zeroes the values of keys behind the last one, which may hold any number: 0 x NaN would spoil the sums.
    // Threads that convert or gather have written zeros there.
    __device__ void zero_unseen(int32_t i) {
        if constexpr (!kCopyEngine) return;
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

    // Finds the highest of this thread's scores of each row, in units of log2(e).
    __device__ void highest(float (&max)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            max[i] = -INFINITY;
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                if (j / 2 % 2 == i) max[i] = fmaxf(max[i], scores_[j]);
            }
            max[i] *= scale_log2(i);
        }
    }

    __device__ float scale_log2(int i) const { return scale_log2_[kUnits == 1 ? 0 : i]; }

    // Raises the maximum of each row that a score of this warpgroup's tile passes by kSlackLog2, and tells
    // the other warpgroup.
    __device__ void raise_max(const float (&max)[2], float (&factor)[2]) {
        const bool raises = __any_sync(~0u, max[0] > max_[0] + kSlackLog2 || max[1] > max_[1] + kSlackLog2);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            factor[i] = 1.0f;
            if (raises) {
                const float of_row = row_max(max[i]);
                if (of_row > max_[i] + kSlackLog2) {
                    factor[i] = ptx::exp2_approx(max_[i] - of_row);
                    max_[i] = of_row;
                }
            }
            if (threadIdx.x % 4 != 0) continue;
            shared_.max[kWarpgroup][row(i)] = max_[i];
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
        for (int j = 0; j < 128; ++j) rows_.out[j] *= factor[j / 2 % 2];
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
            ptx::Wgmma<Number, 256>::rs(rows_.out, weights_ + 4 * k, values(kWarpgroup, k));
        ptx::wgmma_commit();
    }
    __device__ void multiply_others_values(uint32_t parity) {
        ptx::mbarrier_wait(&shared_.full[kOther][kWarpgroup], parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint64_t a = descriptor(&shared_.weights(kOther), 0, 0, 32 * k);
            ptx::Wgmma<Number, 256>::ss_values(rows_.out, a, values(kOther, k));
        }
        ptx::wgmma_commit();
    }

    // Tells the producer that this warp is done with half a tile.
    __device__ void release(int tile, int half) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared_.empty[tile][half]);
    }

    // Brings both warpgroups' sums of the weights together.
    __device__ void finish() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sums_[i] += __shfl_xor_sync(~0u, sums_[i], 1);
            sums_[i] += __shfl_xor_sync(~0u, sums_[i], 2);
            if (threadIdx.x % 4 == 0) shared_.sum[kWarpgroup][row(i)] = sums_[i];
        }
        ptx::named_barrier_sync(kSums, 256);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            rows_.states[i] = {max_[i], shared_.sum[0][row(i)] + shared_.sum[1][row(i)]};
    }

    Sm90LatentShared& shared_;
    const Sm90LatentWork& work_;
    static constexpr int kUnits = kIsFp8 ? 2 : 1;
    float scale_log2_[kUnits];
    int32_t end_keys_[2];
    float scores_[32];
    uint32_t weights_[16];
    float max_[2] = {-INFINITY, -INFINITY}, sums_[2] = {0.0f, 0.0f};
    Sm90LatentRows<T, kWarpgroup> rows_;
};

}  // namespace octavo::cuda
