// Combines what CTAs of sm90_latent have left of sequences that they share (partials.cuh). Page:
// docs/kernels/latent_attention.md.
//
// grid: four CTAs for each tile of rows, with 16 of its rows. A warp owns a sixteenth of their columns,
// and adds up what the runs of the sequence have left, in the order of the runs.
#pragma once

#include "common/online_softmax.h"
#include "cuda/latent/add_states.cuh"
#include "cuda/latent/parameters.h"
#include "cuda/latent/plan.h"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/sm90_latent/partials.cuh"
#include "cuda/sm90_latent/store.cuh"

#include <cstdint>

namespace octavo::cuda {

constexpr int kCombineSm90LatentBands = 4, kCombineSm90LatentThreads = 512;

template <class T>
__global__ void __launch_bounds__(kCombineSm90LatentThreads)
    combine_sm90_latent_kernel(const __grid_constant__ LatentAttentionParams p,
                               const __grid_constant__ LatentLaunch launch) {
    constexpr int kPieces = 4;  // of 32 that a thread of a consumer has
    static_assert(kCombineSm90LatentBands * 16 == kSm90LatentRows);
    static_assert(kCombineSm90LatentThreads / 32 * kPieces * 8 == kLatentVDim);
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const auto tile = static_cast<int32_t>(blockIdx.x) / kCombineSm90LatentBands;
    const int band = static_cast<int>(blockIdx.x) % kCombineSm90LatentBands;
    const int32_t b = launch.tiles_per_sequence.quotient(tile);
    const LatentSequence sequence = LatentSequence::make(p, b);
    const int32_t first_row = launch.tiles_per_sequence.remainder(tile) * kSm90LatentRows + 16 * band;
    const int32_t num_rows = sequence.seqlen_q * p.num_q_heads;
    if (first_row >= num_rows) return;
    const LatentRuns runs = launch.runs[tile];
    if (runs.count == 1) return;  // that run has written the results

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = warp / 8;
    const int first_piece = warp % 8 * kPieces;
    float sums[4 * kPieces] = {};
    SoftmaxState states[2];
    const auto tiles = static_cast<int32_t>(launch.tiles_per_sequence.divisor);
#pragma unroll 4
    for (int32_t run = 0; run < runs.count; ++run) {
        const auto slot = Sm90LatentSlot::of(launch, runs.first_cta + run * tiles, run > 0);
        const float4* const from =
            slot.sums + first_piece * Sm90LatentSlot::kPieceStride + 128 * warpgroup + 32 * band + lane;
        float4 others[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) others[i] = from[i * Sm90LatentSlot::kPieceStride];
        SoftmaxState other_states[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 state = slot.states[16 * band + lane / 4 + 8 * i];
            other_states[i] = {state.x, state.y};
        }
        float own_factors[2], other_factors[2];
        add_states(states, other_states, own_factors, other_factors);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) add_sums(sums + 4 * i, others[i], own_factors, other_factors);
    }

    T* to[2] = {};
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        scale[i] = states[i].inverse_sum() * p.out_scale;
        const int32_t row = first_row + lane / 4 + 8 * i;
        if (row >= num_rows) continue;
        const int64_t token = sequence.first_q + launch.num_q_heads.quotient(row);
        const int64_t head = launch.num_q_heads.remainder(row);
        to[i] = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride +
                warpgroup * kLatentVDim / 2 + 8 * first_piece;
        if (p.lse && warp == 0 && lane % 4 == 0)
            p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = states[i].lse();
    }
    store_pieces<T, kPieces>(to, sums, scale);
}

}  // namespace octavo::cuda
