// The finished rows of a CTA's work, in the registers of a consumer warpgroup: how they come together with
// those of other CTAs, and are written.
#pragma once

#include "common/online_softmax.h"
#include "cuda/latent/add_states.cuh"
#include "cuda/latent/parameters.h"
#include "cuda/partial_words.cuh"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/relaxed.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/types.h"

#include <cstdint>

namespace octavo::cuda {

// Warpgroup w has half w of the columns. Each warp has 16 of the 64 rows.
template <class T, int kWarpgroup>
class Sm90LatentRows {
  public:
    float out[128];  // not divided by the sums yet
    SoftmaxState states[2];

    // A thread has two rows of the accumulators (wgmma.h).
    __device__ static int row(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i; }

    // Whether this warp has rows of the work. The others need not push, add or store anything.
    __device__ static bool has_rows(const Sm90LatentWork& work) {
        return work.first_row + row(0) / 16 * 16 < work.num_rows;
    }

    // Combines the results with those of the other CTA of the cluster, which has other keys. CTA w of it gets
    // those of both warpgroups w; true there.
    __device__ bool combine_with_peer(Sm90LatentShared& shared, const Sm90LatentWork& work) {
        const auto rank = static_cast<int>(ptx::cluster_rank());
        static_assert(sizeof(shared.keys) >= 128 * sizeof(out));
        auto* const peers = reinterpret_cast<float4*>(&shared.keys) + threadIdx.x % 128;
        ptx::cluster_barrier();  // both have multiplied their last keys
        if (rank != kWarpgroup && has_rows(work)) {
            const uint32_t to = ptx::cluster_address(ptx::shared_address(peers), kWarpgroup);
#pragma unroll
            for (int j = 0; j < 32; ++j)
                ptx::store_cluster_float4(
                    to + j * 128 * sizeof(float4),
                    make_float4(out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3]));
            const uint32_t state = ptx::cluster_address(ptx::shared_address(shared.peer_state), kWarpgroup);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (threadIdx.x % 4 == 0)
                    ptx::store_cluster_float2(state + row(i) * sizeof(float2),
                                              make_float2(states[i].max, states[i].sum));
            }
        }
        ptx::cluster_barrier();  // results have arrived
        if (rank != kWarpgroup || !has_rows(work)) return false;
        SoftmaxState others[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 peer = shared.peer_state[row(i)];
            others[i] = {peer.x, peer.y};
        }
        float own_factors[2], other_factors[2];
        add_states(states, others, own_factors, other_factors);
#pragma unroll
        for (int j = 0; j < 32; ++j) add_four(j, peers[128 * j], own_factors, other_factors);
        return true;
    }

    // Pushes these rows to the workspace, for the CTA of a later run.
    __device__ void push(uint32_t* words) const {
        uint32_t* const to = sums_of(words);
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            ptx::store_relaxed_16(
                to + j * kSumStride,
                make_uint4(__float_as_uint(out[4 * j]), __float_as_uint(out[4 * j + 1]),
                           __float_as_uint(out[4 * j + 2]), NonZero::encode(out[4 * j + 3])));
        }
        if (threadIdx.x % 4 != 0) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ptx::store_relaxed_8(states_of(words) + i * kStateStride,
                                 make_uint2(NonZero::encode(states[i].max), NonZero::encode(states[i].sum)));
        }
    }

    // Waits for what `count` CTAs push, adds it, and sets their words to zero. words_of(i): those of the
    // i-th.
    template <class WordsOf>
    __device__ void add_pushed(int32_t count, WordsOf words_of) {
#pragma unroll 1
        for (int32_t n = 0; n < count; ++n) {
            uint32_t* const from = sums_of(words_of(n));
            uint32_t* const states_from = states_of(words_of(n));
            float own_factors[2], other_factors[2];
#pragma unroll
            for (int first = 0; first < 32; first += kAtOnce) {
                uint4 sums[kAtOnce];
                uint2 pushed[2];
                uint32_t least;  // zero while some have not arrived
                do {
                    least = ~0u;
#pragma unroll
                    for (int j = 0; j < kAtOnce; ++j)
                        sums[j] = ptx::load_relaxed_16(from + (first + j) * kSumStride);
                    if (first == 0) {
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            pushed[i] = ptx::load_relaxed_8(states_from + i * kStateStride);
                            least = min(least, min(pushed[i].x, pushed[i].y));
                        }
                    }
#pragma unroll
                    for (int j = 0; j < kAtOnce; ++j) least = min(least, sums[j].w);
                } while (__any_sync(~0u, least == 0));
                if (first == 0) {
                    SoftmaxState others[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        others[i] = {NonZero::decode(pushed[i].x), NonZero::decode(pushed[i].y)};
                    add_states(states, others, own_factors, other_factors);
                    if (threadIdx.x % 4 == 0) {  // all lanes have read the states, by the vote
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            *reinterpret_cast<uint2*>(states_from + i * kStateStride) = make_uint2(0, 0);
                    }
                }
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    const uint4 x = sums[j];
                    add_four(first + j,
                             make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                                         NonZero::decode(x.w)),
                             own_factors, other_factors);
                    *reinterpret_cast<uint4*>(from + (first + j) * kSumStride) = make_uint4(0, 0, 0, 0);
                }
            }
        }
    }

    // Writes the results.
    __device__ void store(const LatentAttentionParams& p, const LatentLaunch& launch,
                          const Sm90LatentWork& work) const {
        for_each_row(p, launch, work, [&](int i, int64_t token, int64_t head, int column, bool writes_lse) {
            T* const to =
                static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + column;
            const float scale = states[i].inverse_sum() * p.out_scale;
#pragma unroll
            for (int j = 0; j < 32; ++j)
                *reinterpret_cast<uint32_t*>(to + 8 * j) =
                    pack<T>(out[4 * j + 2 * i] * scale, out[4 * j + 2 * i + 1] * scale);
            if (writes_lse && p.lse)
                p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = states[i].lse();
        });
    }

    // Writes the results of one of several splits.
    __device__ void store_partial(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  const Sm90LatentWork& work) const {
        for_each_row(p, launch, work, [&](int i, int64_t token, int64_t head, int column, bool writes_lse) {
            const int64_t partial = (blockIdx.y * p.total_q + token) * p.num_q_heads + head;
            float* const to = launch.partial_out + partial * kLatentVDim + column;
            const float scale = states[i].inverse_sum();
#pragma unroll
            for (int j = 0; j < 32; ++j)
                *reinterpret_cast<float2*>(to + 8 * j) =
                    make_float2(out[4 * j + 2 * i] * scale, out[4 * j + 2 * i + 1] * scale);
            if (writes_lse) launch.partial_lse[partial] = states[i].lse();
        });
    }

  private:
    static constexpr int kAtOnce = 8;  // pieces of 16 bytes that a thread loads together

    // This thread's words of those of a CTA: sums, then states, of which each warpgroup has its own.
    __device__ static uint32_t* sums_of(uint32_t* words) { return words + threadIdx.x * 4; }
    __device__ static uint32_t* states_of(uint32_t* words) {
        return words + kSm90LatentRows * (kLatentVDim + 2 * kWarpgroup) + row(0) * 2;
    }
    static constexpr int kSumStride = 256 * 4, kStateStride = 8 * 2;  // of pieces of sums, and of rows

    __device__ void add_four(int j, const float4& x, const float (&own)[2], const float (&other)[2]) {
        const float from[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) out[4 * j + k] = out[4 * j + k] * own[k / 2] + from[k] * other[k / 2];
    }

    // Calls f for each of this thread's rows that there is, with the first of its columns.
    template <class F>
    __device__ static void for_each_row(const LatentAttentionParams& p, const LatentLaunch& launch,
                                        const Sm90LatentWork& work, F f) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32_t r = work.first_row + row(i);
            if (r >= work.num_rows) continue;
            const int64_t token = work.sequence.first_q + launch.num_q_heads.quotient(r);
            const int64_t head = launch.num_q_heads.remainder(r);
            const int column = kWarpgroup * kLatentVDim / 2 + 2 * static_cast<int>(threadIdx.x % 4);
            f(i, token, head, column, kWarpgroup == 0 && threadIdx.x % 4 == 0);
        }
    }
};

}  // namespace octavo::cuda
