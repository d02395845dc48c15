// The producer's warps: one loads Q and K, one loads V, a chunk of columns at a time.
#pragma once

#include "cuda/sm90_attention/producer.cuh"
#include "cuda/sm90_wide_attention/shared.cuh"

namespace octavo::cuda {

// Loads one chunk of the queries of this CTA, once the scorer is done with those before.
__device__ __forceinline__ void load_q_chunk(const Sm90Launch& plan, const Sm90Work& work,
                                             const QueryPlace& at, Sm90WideShared& shared, int chunk,
                                             uint32_t parity) {
    using Config = Sm90WideConfig;
    ptx::mbarrier_wait(&shared.q_empty[chunk], parity ^ 1);
    const int bytes = Config::kChunkBlocks * plan.heads * plan.tokens * Config::kRowBytes;
    if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect(&shared.q_full[chunk], at.any ? bytes : 0);
#pragma unroll
        for (int block = 0; at.any && block < Config::kChunkBlocks; ++block) {
            ptx::tma_load(shared.q[chunk] + block * Config::kQBlockBytes, &plan.q, &shared.q_full[chunk],
                          chunk * Config::kChunkColumns + block * Config::kBlockColumns, work.first_head,
                          at.place, at.shift, at.outer);
        }
    }
    __syncwarp();
}

// One warp: loads Q and K as far ahead of the scorer as the slots allow, across the ends of row tiles too. In
// the first CTA of a pair it also hands out the work.
__device__ inline void run_wide_q_k_loader(const AttentionParams& p, const Sm90Launch& plan,
                                           Sm90WideShared& shared) {
    using Config = Sm90WideConfig;
    const bool leads = ptx::cluster_rank() == 0;
    Sm90Scheduler<Config> scheduler(p, plan);
    Ring<kSm90WorkSlots> work_ring;
    uint32_t q_parity = 0, parity = 0;
    while (true) {
        Sm90Work work;
        if (leads) {
            work = scheduler.work();
            publish<Config>(work, shared, work_ring);
        } else {
            work = take_work<Config>(shared, work_ring);
        }
        if (work.batch < 0) break;
        if (leads) scheduler.request();

        const auto tiles = key_tiles<Config>(p, plan, work);
        const KeyLoader<Config> loader(p, plan, work);
        const QueryPlace at(p, plan, work, tile_block<Config>(0), p.q_batch_stride);
        const int32_t last = tiles.last();
        int32_t pages = last >= 0 ? loader.find_pages(tiles.start(last)) : 0;
        for (int32_t i = last; i >= 0; --i) {
            const int32_t next_pages = i > 0 ? loader.find_pages(tiles.start(i - 1)) : 0;
            for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
                ptx::mbarrier_wait(&shared.k_empty[chunk], parity ^ 1);
                loader.template load<Config::kChunkBlocks>(plan.k, shared.k[chunk], &shared.k_full[chunk],
                                                           tiles.start(i), pages,
                                                           chunk * Config::kChunkColumns);
                if (i == last) load_q_chunk(plan, work, at, shared, chunk, q_parity);
            }
            parity ^= 1;
            pages = next_pages;
        }
        if (last >= 0) q_parity ^= 1;
        if (leads) scheduler.advance();
    }
    if (leads) scheduler.finish();
}

// One warp: loads V.
__device__ inline void run_wide_v_loader(const AttentionParams& p, const Sm90Launch& plan,
                                         Sm90WideShared& shared) {
    using Config = Sm90WideConfig;
    Ring<kSm90WorkSlots> work_ring;
    uint32_t parity = 0, patch_parity = 0;
    while (true) {
        const Sm90Work work = take_work<Config>(shared, work_ring);
        if (work.batch < 0) return;
        const auto tiles = key_tiles<Config>(p, plan, work);
        const KeyLoader<Config> loader(p, plan, work);
        const int32_t last = tiles.last();
        int32_t pages = last >= 0 ? loader.find_pages(tiles.start(last)) : 0;
        for (int32_t i = last; i >= 0; --i) {
            const int32_t first_key = tiles.start(i);
            const int32_t next_pages = i > 0 ? loader.find_pages(tiles.start(i - 1)) : 0;
            const bool has_holes = loader.has_holes(first_key);
            for (int turn = 0; turn < Config::kChunks; ++turn) {  // the multipliers take turns
                const int chunk =
                    turn % Config::kMultipliers * Config::kMultiplierChunks + turn / Config::kMultipliers;
                ptx::mbarrier_wait(&shared.v_empty[chunk], parity ^ 1);
                loader.template load<Config::kChunkBlocks>(
                    plan.v, shared.v[chunk], has_holes ? &shared.patch[chunk] : &shared.v_full[chunk],
                    first_key, pages, chunk * Config::kChunkColumns);
            }
            if (has_holes) {
                for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
                    ptx::mbarrier_wait(&shared.patch[chunk], patch_parity);
                    loader.template fill_holes<Config::kChunkBlocks>(shared.v[chunk], first_key);
                    if (ptx::elect_one()) ptx::mbarrier_arrive(&shared.v_full[chunk]);
                }
                patch_parity ^= 1;
            }
            parity ^= 1;
            pages = next_pages;
        }
    }
}

}  // namespace octavo::cuda
