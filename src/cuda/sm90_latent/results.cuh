// What becomes of the results of a CTA: two warpgroups have half of the columns each, 64 x 256 in registers.
#pragma once

#include "common/online_softmax.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/exp2.h"
#include "cuda/sm90_latent/work.cuh"
#include "cuda/types.h"

#include <cstdint>

namespace octavo::cuda {

// The row of a thread's accumulators 4 j + 2 i and 4 j + 2 i + 1 (wgmma.h).
__device__ inline int sm90_latent_row(int i) {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
}

// The maximum that scores are taken relative to, where a row may have seen no key.
__device__ inline float safe_max(float max) { return max == -INFINITY ? 0.0f : max; }
// What sums are multiplied by when the maximum rises.
__device__ inline float latent_factor(float before, float after) {
    return ptx::exp2_approx(before - safe_max(after));
}

// Combines the results with those of the other CTA of the cluster, which has other keys. CTA w of it gets
// those of both warpgroups w; true there. Results of the other CTA come to lie where keys were.
template <int kWarpgroup, class Shared>
__device__ bool combine_with_peer(const Sm90LatentWork& work, Shared& shared, float (&out)[128],
                                  SoftmaxState (&states)[2]) {
    const auto rank = static_cast<int>(ptx::cluster_rank());
    static_assert(sizeof(shared.keys) >= 128 * sizeof(out));
    auto* const peers = reinterpret_cast<float4*>(&shared.keys) + threadIdx.x % 128;
    ptx::cluster_barrier();  // both have multiplied their last keys
    const bool has_rows = work.first_row + sm90_latent_row(0) / 16 * 16 < work.num_rows;  // this warp
    if (rank != kWarpgroup && has_rows) {
        const uint32_t to = ptx::cluster_address(ptx::shared_address(peers), kWarpgroup);
#pragma unroll
        for (int j = 0; j < 32; ++j)
            ptx::store_cluster_float4(
                to + j * 128 * sizeof(float4),
                make_float4(out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3]));
        const uint32_t state = ptx::cluster_address(ptx::shared_address(shared.peer_state()), kWarpgroup);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (threadIdx.x % 4 == 0)
                ptx::store_cluster_float2(state + sm90_latent_row(i) * sizeof(float2),
                                          make_float2(states[i].max, states[i].sum));
        }
    }
    ptx::cluster_barrier();  // results have arrived
    if (rank != kWarpgroup || !has_rows) return false;
    float factors[2], peer_factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float2 peer = shared.peer_state()[sm90_latent_row(i)];
        const float max = fmaxf(states[i].max, peer.x);
        factors[i] = latent_factor(states[i].max, max);
        peer_factors[i] = latent_factor(peer.x, max);
        states[i] = {max, states[i].sum * factors[i] + peer.y * peer_factors[i]};
    }
#pragma unroll
    for (int j = 0; j < 32; ++j) {
        const float4 peer = peers[128 * j];
        const float of_peer[4] = {peer.x, peer.y, peer.z, peer.w};
#pragma unroll
        for (int k = 0; k < 4; ++k)
            out[4 * j + k] = out[4 * j + k] * factors[k / 2] + of_peer[k] * peer_factors[k / 2];
    }
    return true;
}

template <class T, int kWarpgroup>
__device__ void store_row(const LatentAttentionParams& p, const LatentLaunch& launch,
                          const Sm90LatentWork& work, const float (&out)[128], int i,
                          const SoftmaxState& state) {
    const int32_t r = work.first_row + sm90_latent_row(i);
    if (r >= work.num_rows) return;
    const float inverse = state.inverse_sum();
    const int64_t token = work.sequence.first_q + launch.num_q_heads.quotient(r);
    const int64_t head = launch.num_q_heads.remainder(r);
    const int column = kWarpgroup * kLatentVDim / 2 + 2 * static_cast<int>(threadIdx.x % 4);
    const bool writes_lse = kWarpgroup == 0 && threadIdx.x % 4 == 0;
    if (launch.num_partials > 1) {
        const int64_t total_rows = p.total_q * p.num_q_heads;
        const int64_t partial = blockIdx.y * total_rows + token * p.num_q_heads + head;
        float* const to = launch.partial_out + partial * kLatentVDim + column;
#pragma unroll
        for (int j = 0; j < 32; ++j)
            *reinterpret_cast<float2*>(to + 8 * j) =
                make_float2(out[4 * j + 2 * i] * inverse, out[4 * j + 2 * i + 1] * inverse);
        if (writes_lse) launch.partial_lse[partial] = state.lse();
        return;
    }
    T* const to = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + column;
    const float scale = inverse * p.out_scale;
#pragma unroll
    for (int j = 0; j < 32; ++j)
        *reinterpret_cast<uint32_t*>(to + 8 * j) =
            pack<T>(out[4 * j + 2 * i] * scale, out[4 * j + 2 * i + 1] * scale);
    if (writes_lse && p.lse) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = state.lse();
}

// Stores the results of both rows of this thread, if the CTA of a cluster has any.
template <class T, int kWarpgroup, class Shared>
__device__ void finish_sm90_latent(const LatentAttentionParams& p, const LatentLaunch& launch,
                                   const Sm90LatentWork& work, Shared& shared, float (&out)[128],
                                   SoftmaxState (&states)[2]) {
    if (launch.cluster > 1 && !combine_with_peer<kWarpgroup>(work, shared, out, states)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) store_row<T, kWarpgroup>(p, launch, work, out, i, states[i]);
}

}  // namespace octavo::cuda
