// Attention of 64 rows over a paged cache of latents of 16 bits, by wgmma (sm_90a). A row is a query of one
// head; all rows attend to the one latent head, whose keys are values too: their first 512 numbers. Page:
// docs/kernels/latent_attention.md.
//
// grid: x tiles of rows over the sequences, or two CTAs for each, y splits of the keys. A CTA owns 64 rows of
// a sequence and one split of its keys, which arrive in tiles of 64. Warpgroup 2, the scorer, has the queries
// in registers, and makes the weights of one tile after the other. Warpgroups 0 and 1, the multipliers, have
// half of the columns of the results each, 64 x 256 in registers, and load that half of the keys:
//
//     scorer        S1 = Q K1   softmax 1        S2 = Q K2   softmax 2        S3 = Q K3
//     multipliers               O += P0 V0                   O += P1 V1
//
// so that the tensor cores multiply a tile's values while the next one's scores become weights. Since queries
// take no shared memory but for their rotary part and 16 columns more, there are three tiles of keys: one is
// multiplied, one scored, and one on its way.
//
// A tile lies in shared memory as nine blocks of 64 columns: two halves of four blocks, and the rotary part,
// which only scores need. In the place of the rotary part, its weights come to lie. The two halves, the
// rotary part with the second, are loaded independently.
//
// If there are two splits, their CTAs are a cluster, and combine their results before they write them.
#pragma once

#include "cuda/ptx/grid_dependency.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90_latent/loader.cuh"
#include "cuda/sm90_latent/multiplier.cuh"
#include "cuda/sm90_latent/queries.cuh"
#include "cuda/sm90_latent/scorer.cuh"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/sm90_latent/work.cuh"

#include <cuda.h>

#include <cstdint>

namespace octavo::cuda {

// Loads one half of the keys, and multiplies weights with it.
template <class T, int kHalf>
__device__ __forceinline__ void multiply_sm90_latent(const LatentAttentionParams& p,
                                                     const LatentLaunch& launch, const CUtensorMap& map,
                                                     Sm90LatentShared& shared, const Sm90LatentWork& work) {
    // With the scorer's, what a CTA of three warpgroups gets: 504 registers for a thread of each.
    constexpr int kRegisters = 160;
    const bool loads = threadIdx.x % 128 < 32;
    Sm90LatentLoader<kHalf> loader(p, launch, map, shared, work);
    for (int i = 0; loads && i < kSm90LatentStages - 1; ++i) loader.load_next();
    copy_sm90_latent_queries<T>(p, launch, work, shared);
    ptx::named_barrier_arrive(kQueries, kSm90LatentThreads);
    ptx::lower_registers<kRegisters>();  // the scorer waits for them
    if (loads) loader.load_next();       // where queries were
    Sm90LatentMultiplier<T, kHalf>(p, launch, shared, work).run(loader);
}

template <class T>
__global__ void __launch_bounds__(kSm90LatentThreads, 1)
    sm90_latent_attention_kernel(const __grid_constant__ LatentAttentionParams p,
                                 const __grid_constant__ LatentLaunch launch,
                                 const __grid_constant__ CUtensorMap map) {
    constexpr int kScorerRegisters = 184;
    extern __shared__ __align__(1024) unsigned char sm90_latent_bytes[];
    auto& shared = *reinterpret_cast<Sm90LatentShared*>(sm90_latent_bytes);
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kSm90LatentStages; ++stage) {
            for (int half = 0; half < 2; ++half) {
                ptx::mbarrier_init(&shared.full[stage][half], 1);
                ptx::mbarrier_init(&shared.empty[stage][half], 4);  // the warps of a multiplier arrive
            }
            ptx::mbarrier_init(&shared.full_weights[stage], 4);  // those of the scorer arrive
        }
        ptx::mbarrier_init_fence();
        ptx::tma_prefetch_map(&map);
    }
    __syncthreads();
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const Sm90LatentWork work = Sm90LatentWork::make(p, launch);
    if (work.first_row >= work.num_rows) return;
    if (warpgroup == 0) {
        multiply_sm90_latent<T, 0>(p, launch, map, shared, work);
    } else if (warpgroup == 1) {
        multiply_sm90_latent<T, 1>(p, launch, map, shared, work);
    } else {
        ptx::raise_registers<kScorerRegisters>();
        Sm90LatentScorer<T>(p, launch, shared, work).run();
    }
}

}  // namespace octavo::cuda
