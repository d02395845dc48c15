// Dropout. A warpgroup of its own draws again which weights the forward left out, a tile ahead of the
// consumers, which have few instruction slots to spare. Each key has a bit for each query.
#pragma once

#include "cuda/ptx/carry.h"
#include "cuda/ptx/load_shared.h"
#include "cuda/ptx/sign_bits.h"
#include "cuda/sm90_backward/shared.cuh"
#include "cuda/types.h"

namespace octavo::cuda {

// Transposes a matrix of bits: bit q of lane k becomes bit k of lane q. Each of five steps swaps two blocks
// beside the diagonal.
__device__ __forceinline__ uint32_t transpose_bits(uint32_t x) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t size = 16, low = 0xffff; size > 0; size /= 2, low ^= low << size) {
        const bool lower = lane & size;
        const uint32_t other = __shfl_xor_sync(~0u, x, size), own = lower ? ~low : low;
        x = (x & own) | (__funnelshift_l(other, other, lower ? 32 - size : size) & ~own);
    }
    return x;
}

// Each lane draws for one of 32 queries and for 32 keys, eight keys from each counter of Philox.
template <class Config>
__device__ __forceinline__ void draw_dropped(const AttentionBackwardParams& p,
                                             const Sm90BackwardWork<Config>& work, int32_t step_begin,
                                             Sm90BackwardShared<Config>& shared) {
    constexpr int kKeyBlocks = Config::kKeys / 32, kBlocks = Config::kQueries / 32 * kKeyBlocks;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    const int last = 31 - lane;  // draws come from the highest bit down
    const int key = last % 8 / 2 * 8 + last / 8 * 2 + last % 2;
    Sm90BackwardStep<Config> step(work, step_begin);
#pragma unroll 1
    for (; step.is_left(); step.advance(work)) {
        const uint64_t head = p.dropout.head(work.batch, p.num_q_heads, step.head);
        ptx::mbarrier_wait(&shared.q_empty[step.stage()], step.parity() ^ 1);
#pragma unroll 1
        for (int block = warp; block < kBlocks; block += Config::kDrawingWarps) {
            const int keys = block % kKeyBlocks, queries = block / kKeyBlocks;
            const int32_t query = step.tile * Config::kQueries + 32 * queries + lane;
            uint32_t kept = 0;
#pragma unroll 4
            for (int pair = 0; pair < 4; ++pair) {
                const Philox random = p.dropout.bits(head, query, work.first_key / 32 + keys, pair);
#pragma unroll
                for (uint32_t word : random.words) {
                    // The carry of a sum says what drops_even and drops_odd say.
                    const uint32_t complement = -(p.dropout.threshold << 16);
                    kept = ptx::append_carry(kept, word << 16, complement);
                    kept = ptx::append_carry(kept, word, complement);
                }
            }
            shared.dropped[step.stage()][32 * keys + key][queries] = ~transpose_bits(kept);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&shared.dropped_full[step.stage()]);
    }
}

// What a lane of the consumers does with dropped weights. It stores them as negative numbers, which
// no weight is, until their gradients are known. Weights have 16 bits, since there are no registers for more.
template <class T, class Config>
class DroppedWeights {
    static constexpr int kPairs = Config::kQueries / 4;

  public:
    // `row` is that of the lane's first key.
    __device__ __forceinline__ void read(Sm90BackwardShared<Config>& shared,
                                         const Sm90BackwardStep<Config>& step, int row) {
        ptx::mbarrier_wait(&shared.dropped_full[step.stage()], step.parity());
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t address = ptx::shared_address(shared.dropped[step.stage()][row + 8 * half]);
            uint32_t words[Config::kQueries / 32];
            if constexpr (Config::kQueries == 64) {
                const uint2 x = ptx::load_shared_8(address);
                words[0] = x.x, words[1] = x.y;
            } else {
                const uint4 x = ptx::load_shared_16(address);
                words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
            }
#pragma unroll
            for (int i = 0; i < Config::kQueries / 32; ++i) {
                const uint32_t own = words[i] >> 2 * (threadIdx.x % 4) & 0x03030303u;
                const uint32_t placed = own << (2 * (i % 2) + 4 * half);
                bits_[i / 2] = half == 0 && i % 2 == 0 ? placed : bits_[i / 2] | placed;
            }
        }
    }

    __device__ __forceinline__ void mark(uint32_t (&weights)[kPairs], const float (&scores)[2 * kPairs],
                                         const float* delta) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const uint32_t bits = bits_[j / 16] >> (j / 2 % 4 * 8 + j / 8 % 2 * 2 + j % 2 * 4);
            weights[j] = pack<T>(scores[2 * j], scores[2 * j + 1]) | (bits & 1) << 15 | (bits & 2) << 30;
        }
        // The reads are wide, since each one is slow: products take most of what shared memory gives.
#pragma unroll
        for (int i = 0; i < kPairs; i += 4) {
            const int place = statistic_place<Config::kQueries>(4 * i + 2 * (threadIdx.x % 4));
            const uint4 x = ptx::load_shared_16(ptx::shared_address(delta + place));
            delta_[i] = __uint_as_float(x.x);
            delta_[i + 1] = __uint_as_float(x.y);
            delta_[i + 2] = __uint_as_float(x.z);
            delta_[i + 3] = __uint_as_float(x.w);
        }
    }

    // Computes the gradients of scores, and leaves the weights that are kept. For a dropped weight, the
    // gradient of its score is the weight times -delta.
    __device__ __forceinline__ void drop(uint32_t (&gradients)[kPairs], uint32_t (&weights)[kPairs],
                                         const float (&products)[2 * kPairs]) const {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const float2 marked = unpack<T>(weights[j]);
            auto gradient = [](float weight, float product, float delta) {
                const bool kept = __float_as_int(weight) >= 0;
                return fabsf(weight) * ((kept ? product : 0.0f) - delta);
            };
            gradients[j] = pack<T>(gradient(marked.x, products[2 * j], delta_[j / 2 * 2]),
                                   gradient(marked.y, products[2 * j + 1], delta_[j / 2 * 2 + 1]));
            weights[j] &= ~ptx::negative_halves(weights[j]);
        }
    }

  private:
    // Each byte says which of a pair of columns are dropped: bits 0 and 1 for every second word of 32
    // queries, bits 2 and 3 for the other words, and bits 4 to 7 the same for the second key.
    uint32_t bits_[Config::kQueries / 64];
    float delta_[kPairs];  // delta of the lane's queries
};

}  // namespace octavo::cuda
