// The finished rows of a sequence, in the registers of a CTA: how they come together, go from CTA to CTA, and
// are written.
#pragma once

#include "common/online_softmax.h"
#include "cuda/latent/add_states.cuh"
#include "cuda/latent/parameters.h"
#include "cuda/latent_decode/products.cuh"
#include "cuda/latent_decode/softmax.cuh"
#include "cuda/partial_words.cuh"
#include "cuda/ptx/relaxed.h"
#include "cuda/ptx/warpgroup.h"

#include <cstdint>

namespace octavo::cuda {

// A warp has 64 of the 512 columns of all 16 rows. A lane has rows g and g + 8, in the order of mma.sync.
template <class Config>
class LatentRowsOfCta {
  public:
    // Exchanges halves of the columns with the warp that has the other keys, where the queries were, which
    // are in registers by now. All consumers call it together.
    __device__ LatentRowsOfCta(LatentRowsSoftmax<Config>& softmax, LatentDecodeShared<Config>& shared) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int keys = warp / Config::kColumnParts;
        auto& exchange = shared.exchange;
        softmax.sum_over_keys();
#pragma unroll
        for (int i = 0; i < kOwnTiles; ++i) {
            const float (&kept)[4] = softmax.out[i], (&given)[4] = softmax.out[kOwnTiles + i];
            // The first half of the columns stays with the warp that has the first keys.
#pragma unroll
            for (int j = 0; j < 4; ++j) sums_[i][j] = keys == 0 ? kept[j] : given[j];
            exchange.sums[warp][i][lane] = keys == 0 ? make_float4(given[0], given[1], given[2], given[3])
                                                     : make_float4(kept[0], kept[1], kept[2], kept[3]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            states_[i] = {softmax.max[i], softmax.sum[i]};
            if (lane % 4 == 0) exchange.states[warp][row(i)] = make_float2(softmax.max[i], softmax.sum[i]);
        }
        ptx::named_barrier_sync(kConsumersBarrier, kLatentDecodeConsumers);
        const int other = warp ^ Config::kColumnParts;
        SoftmaxState others[2];
        float4 sums[kOwnTiles];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 state = exchange.states[other][row(i)];
            others[i] = {state.x, state.y};
        }
#pragma unroll
        for (int i = 0; i < kOwnTiles; ++i) sums[i] = exchange.sums[other][i][lane];
        add(others, sums);
    }

    // Pushes these rows to the workspace, for a later CTA.
    __device__ void push(uint32_t* words) const {
#pragma unroll
        for (int i = 0; i < kOwnTiles; ++i) {
            ptx::store_relaxed_16(words + sums_at(i),
                                  make_uint4(__float_as_uint(sums_[i][0]), __float_as_uint(sums_[i][1]),
                                             __float_as_uint(sums_[i][2]), NonZero::encode(sums_[i][3])));
        }
        if (threadIdx.x % 4 != 0) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ptx::store_relaxed_8(words + state_at(i), make_uint2(NonZero::encode(states_[i].max),
                                                                 NonZero::encode(states_[i].sum)));
        }
    }

    // Waits for what `count` CTAs push, adds it, and sets their words to zero. words_of_cta(i): those of
    // the i-th.
    template <class WordsOf>
    __device__ void add_pushed(int32_t count, WordsOf words_of_cta) {
#pragma unroll 1
        for (int32_t first = 0; first < count; first += kAtOnce) {
            uint2 states[kAtOnce][2];
            uint4 sums[kAtOnce][kOwnTiles];
            uint32_t least;  // zero while some have not arrived
            // In place of those past the end, the last one is loaded: if loads depended on a condition, they
            // would not all be in flight together.
            auto words_of = [&](int i) { return words_of_cta(min(first + i, count - 1)); };
            do {
                least = ~0u;
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                    for (int j = 0; j < kOwnTiles; ++j)
                        sums[i][j] = ptx::load_relaxed_16(words_of(i) + sums_at(j));
#pragma unroll
                    for (int j = 0; j < 2; ++j) states[i][j] = ptx::load_relaxed_8(words_of(i) + state_at(j));
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                    for (int j = 0; j < kOwnTiles; ++j) least = min(least, sums[i][j].w);
#pragma unroll
                    for (int j = 0; j < 2; ++j) least = min(least, min(states[i][j].x, states[i][j].y));
                }
            } while (__any_sync(~0u, least == 0));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (first + i >= count) break;
                SoftmaxState others[2];
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    others[j] = {NonZero::decode(states[i][j].x), NonZero::decode(states[i][j].y)};
                float4 other_sums[kOwnTiles];
#pragma unroll
                for (int j = 0; j < kOwnTiles; ++j) {
                    const uint4 x = sums[i][j];
                    other_sums[j] = make_float4(__uint_as_float(x.x), __uint_as_float(x.y),
                                                __uint_as_float(x.z), NonZero::decode(x.w));
                    *reinterpret_cast<uint4*>(words_of(i) + sums_at(j)) = make_uint4(0, 0, 0, 0);
                }
                add(others, other_sums);
                if (threadIdx.x % 4 != 0) continue;  // all lanes have read the states, by the vote
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    *reinterpret_cast<uint2*>(words_of(i) + state_at(j)) = make_uint2(0, 0);
            }
        }
    }

    // Writes the results of a sequence.
    __device__ void store(const LatentAttentionParams& p, const LatentLaunch& launch,
                          const LatentSequence& sequence) const {
        using T = typename Config::Type;
        const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
        const int first_column = warp % Config::kColumnParts * Config::kColumns + first_tile() * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (row(i) >= sequence.seqlen_q * p.num_q_heads) continue;
            const int64_t token = sequence.first_q + launch.num_q_heads.quotient(row(i));
            const int64_t head = launch.num_q_heads.remainder(row(i));
            T* const to =
                static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + first_column;
            const float scale = states_[i].inverse_sum() * p.out_scale;
            auto store_pair = [&](int column, float low, float high) {
                *reinterpret_cast<uint32_t*>(to + column) = pack<T>(low * scale, high * scale);
            };
#pragma unroll
            for (int tile = 0; tile < kOwnTiles; tile += 2) {
                const float (&a)[4] = sums_[tile], (&b)[4] = sums_[tile + 1];
                if constexpr (Config::kFp8) {  // tiles have every other column
                    store_pair(8 * tile + 4 * t, a[2 * i], b[2 * i]);
                    store_pair(8 * tile + 4 * t + 2, a[2 * i + 1], b[2 * i + 1]);
                } else {
                    store_pair(8 * tile + 2 * t, a[2 * i], a[2 * i + 1]);
                    store_pair(8 * tile + 8 + 2 * t, b[2 * i], b[2 * i + 1]);
                }
            }
            if (warp == 0 && t == 0 && p.lse)
                p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = states_[i].lse();
        }
    }

  private:
    static constexpr int kOwnTiles = Config::kOwnTiles;
    static constexpr int kAtOnce = 2;  // CTAs whose results are loaded together

    __device__ static int row(int i) { return threadIdx.x % 32 / 4 + 8 * i; }
    __device__ static int first_tile() { return threadIdx.x / 32 / Config::kColumnParts * kOwnTiles; }

    // Where this thread's part of a CTA's words lies: sums, then states, of which each warp has its own.
    __device__ static int sums_at(int tile) { return (tile * kLatentDecodeConsumers + threadIdx.x) * 4; }
    __device__ static int state_at(int i) {
        return kLatentRows * kLatentVDim + (threadIdx.x / 32 * kLatentRows + row(i)) * 2;
    }

    __device__ void add(const SoftmaxState (&others)[2], const float4 (&sums)[kOwnTiles]) {
        float own[2], other[2];
        add_states(states_, others, own, other);
#pragma unroll
        for (int i = 0; i < kOwnTiles; ++i) add_sums(sums_[i], sums[i], own, other);
    }

    float sums_[kOwnTiles][4];
    SoftmaxState states_[2];
};

}  // namespace octavo::cuda
