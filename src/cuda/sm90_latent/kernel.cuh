// Attention of 64 rows over a paged cache of latents, by wgmma (sm_90a). A row is a query of one head; all
// rows attend to the one latent head, whose keys are values too: their first 512 numbers. Page:
// docs/kernels/latent_attention.md.
//
// A CTA owns 64 rows of a sequence and some of its keys, either
//  - one split of them; grid: x tiles of rows over the sequences, or two CTAs for each, y splits; or
//  - by a schedule (latent/schedule.cuh) a run of all sequences' keys, one sequence behind the other; grid: a
//    CTA for each tile of rows of a sequence, for each run. What it has of sequences that it shares with
//    other CTAs, it leaves for combine_sm90_latent_kernel (combine.cuh).
// Two warpgroups multiply; a third one loads: by the copy engine, key by key where pages are too small for
// it, or, over codes of fp8, by converting them.
// Beside the copy engine, with a schedule, its idle warps copy the queries of the next sequence, too.
// Keys arrive in tiles of 64, two at a time, an even one and an odd one. Warpgroup w has the scores of tile w
// of a pair, and half w of the columns of the results, 64 x 256 in registers, for both tiles:
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
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90_latent/consumer.cuh"
#include "cuda/sm90_latent/converter.cuh"
#include "cuda/sm90_latent/gatherer.cuh"
#include "cuda/sm90_latent/producer.cuh"
#include "cuda/sm90_latent/queries.cuh"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/sm90_latent/works.cuh"

#include <cuda.h>

#include <type_traits>

namespace octavo::cuda {

// Registers of a thread: those of three warpgroups fill the SM. With a schedule, loading takes a few more.
template <Sm90LatentCache kCache, bool kIsScheduled>
struct Sm90LatentRegisters {
    static constexpr int kConsumer =
        kCache != Sm90LatentCache::numbers ? (kIsScheduled ? 216 : 208) : (kIsScheduled ? 232 : 240);
    static constexpr int kProducer = 504 - 2 * kConsumer;
};

template <class T, Sm90LatentCache kCache, bool kIsScheduled>
__global__ void __launch_bounds__(kSm90LatentThreads, 1)
    sm90_latent_attention_kernel(const __grid_constant__ LatentAttentionParams p,
                                 const __grid_constant__ LatentLaunch launch,
                                 const __grid_constant__ CUtensorMap map) {
    // Whether warps that do not load keys copy the queries of the next work. Without a schedule there is
    // none.
    constexpr bool kCopiesQueries = kIsScheduled && kCache == Sm90LatentCache::numbers;
    // How many arrivals hand on half of a tile: those of the copies of each thread that gathers, or one of
    // each warp that converts.
    constexpr int kArrivals = kCache == Sm90LatentCache::gathered ? 128
                              : kCache == Sm90LatentCache::fp8    ? 4
                                                                  : 1;
    extern __shared__ __align__(1024) unsigned char sm90_latent_bytes[];
    auto& shared = *reinterpret_cast<Sm90LatentShared*>(sm90_latent_bytes);
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; ++i) {
            ptx::mbarrier_init(&shared.full[i / 2][i % 2], kArrivals);
            ptx::mbarrier_init(&shared.empty[i / 2][i % 2], 4);  // the warps of one warpgroup arrive
        }
        if constexpr (kCopiesQueries) {
            ptx::mbarrier_init(&shared.queries_full, Sm90LatentQueryCopier<T>::kWarps);
            ptx::mbarrier_init(&shared.queries_empty, 8);  // the warps of both consumers arrive
        }
        ptx::mbarrier_init_fence();
        if constexpr (kCache == Sm90LatentCache::numbers) ptx::tma_prefetch_map(&map);
    }
    __syncthreads();
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const auto works = [&] {
        if constexpr (kIsScheduled)
            return Sm90LatentSegments(p, launch, shared);
        else
            return Sm90LatentSplit(p, launch, shared);
    }();
    if (works.is_empty()) return;
    using Registers = Sm90LatentRegisters<kCache, kIsScheduled>;
    Sm90LatentPhases phases;
    if (warpgroup == 2) {
        ptx::lower_registers<Registers::kProducer>();
        if constexpr (kCache == Sm90LatentCache::gathered) {
            works.for_each(
                [&](const auto& work) { Sm90LatentGatherer(p, launch, shared, work).run(phases); });
        } else if constexpr (kCache == Sm90LatentCache::fp8) {
            works.for_each(
                [&](const auto& work) { Sm90LatentConverter(p, launch, shared, work).run(phases); });
        } else if (threadIdx.x / 32 == 8) {
            works.for_each(
                [&](const auto& work) { Sm90LatentProducer(p, launch, map, shared, work).run(phases); });
        } else if constexpr (kCopiesQueries) {
            const Sm90LatentQueryCopier<T> copier(p, launch, shared, threadIdx.x / 32 - 9);
            works.for_each([&](const auto& work) { copier.run(work, phases); });
        }
    } else {
        ptx::raise_registers<Registers::kConsumer>();
        const auto consume = [&](auto which) {
            constexpr int kWarpgroup = decltype(which)::value;
            works.for_each([&](const auto& work) {
                if constexpr (kCopiesQueries)
                    ptx::mbarrier_wait(&shared.queries_full, phases.of_queries());
                else
                    copy_sm90_latent_queries<T, kCache>(p, launch, work, shared);
                // Queries are there, and both warpgroups have read the sums of the last work.
                ptx::named_barrier_sync(kQueries, 256);
                Sm90LatentConsumer<T, kCache, kWarpgroup, kCopiesQueries> consumer(p, launch, shared, work);
                works.finish(consumer.run(phases), work);
            });
        };
        if (warpgroup == 0)
            consume(std::integral_constant<int, 0>{});
        else
            consume(std::integral_constant<int, 1>{});
    }
}

}  // namespace octavo::cuda
