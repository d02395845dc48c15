// Attention of 64 rows over a paged cache of latents in fp8, by wgmma (sm_90a): as kernel.cuh, with another
// schedule, since a warpgroup is needed that converts codes. Page: docs/kernels/latent_attention.md.
//
// grid: x tiles of rows over the sequences, or two CTAs for each, y splits of the keys. A CTA owns 64 rows of
// a sequence and one split of its keys. Two warpgroups multiply; a third one converts. Keys arrive in tiles
// of 64, two at a time, an even one and an odd one. Warpgroup w has the scores of tile w of a pair, and half
// w of the columns of the results, 64 x 256 in registers, for both tiles:
//
//     warpgroup 0   S0 = Q K0   softmax   O0 += P0 V0[0]             O0 += P1 V1[0]
//     warpgroup 1   S1 = Q K1             O1 += P0 V0[1], softmax    O1 += P1 V1[1]
//
// so that one multiplies while the other makes weights. Both multiply the even tile first, so that its place
// is free early. The maximum of a row goes from tile to tile: warpgroup 0 raises it by tile 0 and hands it on
// with P0, warpgroup 1 raises it by tile 1 and hands it back with P1, each with the factor for the sums so
// far. (The parts of the warpgroups are those of FlashMLA: "A Deep Dive Into The Flash MLA FP8 Decoding
// Kernel on Hopper" and its predecessor, DeepSeek, 2025.)
//
// A tile lies in shared memory as nine blocks of 64 columns: two halves of four blocks, and the rotary part,
// which only scores need. In the place of the rotary part, weights then go from one warpgroup to the other.
// The two halves, the rotary part with one of them, are loaded again independently.
//
// If there are two splits, their CTAs are a cluster, and combine their results before they write them.
#pragma once

#include "cuda/ptx/grid_dependency.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90_latent/converter.cuh"
#include "cuda/sm90_latent/fp8_consumer.cuh"
#include "cuda/sm90_latent/queries.cuh"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/sm90_latent/work.cuh"

#include <cstdint>

namespace octavo::cuda {

template <class T>
__global__ void __launch_bounds__(kSm90LatentThreads, 1)
    sm90_latent_fp8_attention_kernel(const __grid_constant__ LatentAttentionParams p,
                                     const __grid_constant__ LatentLaunch launch) {
    constexpr int kConsumerRegisters = 208,
                  kConverterRegisters = 88;  // those of three warpgroups fill the SM
    extern __shared__ __align__(1024) unsigned char sm90_latent_fp8_bytes[];
    auto& shared = *reinterpret_cast<Sm90LatentFp8Shared*>(sm90_latent_fp8_bytes);
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; ++i) {
            ptx::mbarrier_init(&shared.full[i / 2][i % 2], 4);   // the warps that convert arrive
            ptx::mbarrier_init(&shared.empty[i / 2][i % 2], 4);  // the warps of one warpgroup arrive
        }
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const Sm90LatentWork work = Sm90LatentWork::make(p, launch);
    if (work.first_row >= work.num_rows) return;
    if (warpgroup == 2) {
        ptx::lower_registers<kConverterRegisters>();
        Sm90LatentConverter(p, launch, shared, work).run();
    } else {
        copy_sm90_latent_queries<T>(p, launch, work, shared);
        ptx::named_barrier_sync(kQueries, 256);
        ptx::raise_registers<kConsumerRegisters>();
        if (warpgroup == 0)
            Sm90LatentFp8Consumer<T, 0>(p, launch, shared, work).run();
        else
            Sm90LatentFp8Consumer<T, 1>(p, launch, shared, work).run();
    }
}

}  // namespace octavo::cuda
