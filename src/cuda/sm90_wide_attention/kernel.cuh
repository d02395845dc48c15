// Attention forward of head dims above 256 on Hopper's tensor cores (sm_90a): dense, packed or paged.
//
// 64 rows of results, 512 columns wide in float32, fill half of an SM's registers, so they belong to two
// warpgroups, the multipliers, a half of the columns each. A third, the scorer, makes the weights for both:
//
//     scorer         S0 = Q K0   P0 of S0   S1 = Q K1   P1 of S1   S2 = Q K2   P2 of S2 ...
//     multipliers                                       O += P0 V0             O += P1 V1 ...
//
// Weights are handed on once the next scores are there, so that the tensor cores have the products with
// values to do while the scorer makes weights, and a new product Q K behind. Keys and values come in chunks
// of 128 columns, since one tile of each is all that there is room for: a chunk is loaded again as soon as it
// was multiplied. Two CTAs of a cluster, of 64 rows each, load every chunk together.
//
// grid: persistent, one CTA per SM. A pair takes row tiles from a counter until none is left, and owns all
// keys of each. Schedule and measurements: docs/kernels/sm90_wide_attention.md.
#pragma once

#include "cuda/ptx/grid_dependency.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90_wide_attention/multiplier.cuh"
#include "cuda/sm90_wide_attention/producer.cuh"
#include "cuda/sm90_wide_attention/scorer.cuh"

namespace octavo::cuda {

template <class T>
__global__ void __launch_bounds__(Sm90WideConfig::kThreads, 1)
    sm90_wide_attention_kernel(const __grid_constant__ AttentionParams p,
                               const __grid_constant__ Sm90Launch plan) {
    using Config = Sm90WideConfig;
    extern __shared__ __align__(1024) unsigned char sm90_wide_bytes[];
    auto& shared = *reinterpret_cast<Sm90WideShared*>(sm90_wide_bytes);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        shared.init();
        for (const CUtensorMap* map : {&plan.q, &plan.k, &plan.v}) ptx::tma_prefetch_map(map);
    }
    __syncthreads();
    ptx::cluster_barrier_relaxed();
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();

    if (warp < 4) {
        ptx::lower_registers<Config::kProducerRegisters>();
        if (warp == 0) run_wide_q_k_loader(p, plan, shared);
        if (warp == 1) run_wide_v_loader(p, plan, shared);
    } else if (warp < 8) {
        ptx::raise_registers<Config::kScorerRegisters>();
        Sm90WideScorer<T>(p, plan, shared).run();
    } else {
        ptx::raise_registers<Config::kMultiplierRegisters>();
        Sm90WideMultiplier<T>(p, plan, shared, warp / 4 - 2).run();
    }
    ptx::cluster_barrier_relaxed();  // the other CTA may still write here
}

}  // namespace octavo::cuda
