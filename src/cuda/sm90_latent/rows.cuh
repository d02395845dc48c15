// The finished rows of a CTA's work, in the registers of a consumer warpgroup: how they come together with
// those of other CTAs, and are written.
#pragma once

#include "common/online_softmax.h"
#include "cuda/latent/add_states.cuh"
#include "cuda/latent/parameters.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_latent/partials.cuh"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/sm90_latent/store.cuh"
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

    // Whether this warp has rows of the work. The others need not leave or store anything.
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
        for (int j = 0; j < 32; ++j) add_sums(out + 4 * j, peers[128 * j], own_factors, other_factors);
        return true;
    }

    // Leaves these rows in a slot, for combine_sm90_latent_kernel.
    __device__ void leave(const Sm90LatentSlot& slot) const {
#pragma unroll
        for (int j = 0; j < 32; ++j)
            slot.sums[j * Sm90LatentSlot::kPieceStride + threadIdx.x] =
                make_float4(out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (kWarpgroup == 0 && threadIdx.x % 4 == 0)
                slot.states[row(i)] = make_float2(states[i].max, states[i].sum);
        }
    }

    // Writes the results.
    __device__ void store(const LatentAttentionParams& p, const LatentLaunch& launch,
                          const Sm90LatentWork& work) const {
        T* to[2] = {};
        float scale[2];
        for_each_row(p, launch, work, [&](int i, int64_t token, int64_t head, bool writes_lse) {
            to[i] = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride +
                    kWarpgroup * kLatentVDim / 2;
            if (writes_lse && p.lse)
                p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = states[i].lse();
        });
#pragma unroll
        for (int i = 0; i < 2; ++i) scale[i] = states[i].inverse_sum() * p.out_scale;
        store_pieces<T, 32>(to, out, scale);
    }

    // Writes the results of one of several splits.
    __device__ void store_partial(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  const Sm90LatentWork& work) const {
        for_each_row(p, launch, work, [&](int i, int64_t token, int64_t head, bool writes_lse) {
            const int column = kWarpgroup * kLatentVDim / 2 + 2 * static_cast<int>(threadIdx.x % 4);
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
    // Calls f for each of this thread's rows that there is.
    template <class F>
    __device__ static void for_each_row(const LatentAttentionParams& p, const LatentLaunch& launch,
                                        const Sm90LatentWork& work, F f) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32_t r = work.first_row + row(i);
            if (r >= work.num_rows) continue;
            const int64_t token = work.sequence.first_q + launch.num_q_heads.quotient(r);
            const int64_t head = launch.num_q_heads.remainder(r);
            f(i, token, head, kWarpgroup == 0 && threadIdx.x % 4 == 0);
        }
    }
};

}  // namespace octavo::cuda
