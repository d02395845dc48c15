// Dropout. A warpgroup of its own draws again which weights the forward left out, a tile ahead of the
// consumers, which have few instruction slots to spare. Each key has a bit for each query.
#pragma once

#include "cuda/ptx/carry.h"
#include "cuda/ptx/load_shared.h"
#include "cuda/sm90_backward/shared.cuh"
#include "cuda/sm90_backward/statistics.cuh"
#include "cuda/types.h"
#include "cuda/warp.cuh"

namespace octavo::cuda {

// Transposes a matrix of bits: bit q of lane k becomes bit k of lane q. Each of five steps swaps two blocks
// beside the diagonal.
__device__ __forceinline__ uint32_t transpose_bits(uint32_t x) {
    uint32_t lane = threadIdx.x % 32;
    pin_in_register(lane);  // ptxas would compute masks of it ahead, and has no registers for them
#pragma unroll
    for (uint32_t size = 16, low = 0xffff; size > 0; size /= 2, low ^= low << size) {
        const bool lower = lane & size;
        const uint32_t other = __shfl_xor_sync(~0u, x, size), own = lower ? ~low : low;
        x = (x & own) | (__funnelshift_l(other, other, lower ? 32 - size : size) & ~own);
    }
    return x;
}

// Each lane draws for one of 32 queries and for 32 keys, eight keys from each counter of Philox. A byte
// has the bits of the queries whose columns one lane of the consumers has.
template <class Config>
__device__ __forceinline__ void draw_dropped(const AttentionBackwardParams& p,
                                             const Sm90BackwardWork<Config>& work, int32_t step_begin,
                                             Sm90BackwardShared<Config>& shared) {
    constexpr int kKeyBlocks = Config::kKeys / 32, kGroups = Config::kDrawingWarps / kKeyBlocks;
    static_assert(kGroups * kKeyBlocks == Config::kDrawingWarps);
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    const int keys = warp % kKeyBlocks;
    const int last = 31 - lane;  // draws come from the highest bit down
    const int key = 32 * keys + last % 8 / 2 * 8 + last / 8 * 2 + last % 2;
    const int own_query = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    Sm90BackwardStep<Config> step(work, step_begin);
#pragma unroll 1
    for (; step.is_left(); step.advance(work)) {
        const uint64_t head = p.dropout.head(work.batch, p.num_q_heads, step.head);
        ptx::mbarrier_wait(&shared.q_empty[step.stage()], step.parity() ^ 1);
#pragma unroll 1
        for (int queries = warp / kKeyBlocks; queries < Config::kQueries / 32; queries += kGroups) {
            const int32_t query = step.tile * Config::kQueries + 32 * queries + own_query;
            int32_t key_block = work.first_key / 32 + keys;
            pin_in_register(key_block);  // likewise
            uint32_t kept = 0;
#pragma unroll 4
            for (int pair = 0; pair < 4; ++pair) {
                const Philox random = p.dropout.bits(head, query, key_block, pair);
#pragma unroll
                for (uint32_t word : random.words) {
                    // The carry of a sum says what drops_even and drops_odd say.
                    const uint32_t complement = -(p.dropout.threshold << 16);
                    kept = ptx::append_carry(kept, word << 16, complement);
                    kept = ptx::append_carry(kept, word, complement);
                }
            }
            shared.dropped[step.stage()][key][queries] = ~transpose_bits(kept);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&shared.dropped_full[step.stage()]);
    }
}

// What a lane of the consumers does with dropped weights.
template <class Config>
class DroppedWeights {
    static constexpr int kScores = Config::kQueries / 2;

  public:
    // `row` is that of the lane's first key.
    __device__ __forceinline__ void read(Sm90BackwardShared<Config>& shared,
                                         const Sm90BackwardStep<Config>& step, int row) {
        ptx::mbarrier_wait(&shared.dropped_full[step.stage()], step.parity());
        const uint32_t byte = threadIdx.x % 4, own = byte | (byte | 4) << 4;
        uint32_t halves[2 * kWords];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t address = ptx::shared_address(shared.dropped[step.stage()][row + 8 * half]);
            if constexpr (Config::kQueries == 64) {
                const uint2 x = ptx::load_shared_8(address);
                halves[half] = __byte_perm(x.x, x.y, own);
            } else {
                const uint4 x = ptx::load_shared_16(address);
                halves[2 * half] = __byte_perm(x.x, x.y, own);
                halves[2 * half + 1] = __byte_perm(x.z, x.w, own);
            }
        }
#pragma unroll
        for (int i = 0; i < kWords; ++i) bits_[i] = __byte_perm(halves[2 * i], halves[2 * i + 1], 0x5410);
    }

    // Computes the weights that are kept, and the gradients of scores. For a dropped weight, this is the
    // weight times -delta.
    template <class T, class Store>
    __device__ __forceinline__ void drop(uint32_t (&gradients)[kScores / 2], uint32_t (&kept)[kScores / 2],
                                         const float (&weights)[kScores], const float (&products)[kScores],
                                         const float* delta, Store store) {
        const LaneStatistics<Config> deltas(delta);
        float4 next = deltas.of(0);
#pragma unroll
        for (int i = 0; i < kScores; i += 8) {
            const float of_queries[4] = {next.x, next.y, next.z, next.w};
            if (i + 8 < kScores) next = deltas.of(i / 8 + 1);
#pragma unroll
            for (int j = i; j < i + 8; j += 2) {
                float kept_weight[2], gradient[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int bit = j / 2 % 2 * (kScores / 2) + j / 4 * 2 + k;
                    const float weight = weights[j + k];
                    kept_weight[k] = bits_[bit / 32] >> bit % 32 & 1 ? 0.0f : weight;
                    gradient[k] =
                        fmaf(-weight, of_queries[(j - i) / 4 * 2 + k], kept_weight[k] * products[j + k]);
                }
                gradients[j / 2] = pack<T>(gradient[0], gradient[1]);
                kept[j / 2] = pack<T>(kept_weight[0], kept_weight[1]);
            }
            store(i / 2);
        }
    }

  private:
    // A bit for each score: those of the first key come first, then those of the second.
    static constexpr int kWords = kScores / 32;
    uint32_t bits_[kWords];
};

}  // namespace octavo::cuda
