// The warp that loads. It brings K and V of a tile of keys, and tiles of Q and dO with their statistics as
// far ahead of the consumers as the slots allow.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/ptx/l2_policy.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_backward/alibi.cuh"
#include "cuda/sm90_backward/kept_steps.cuh"
#include "cuda/sm90_backward/shared.cuh"

namespace octavo::cuda {

// How many steps are left to load when a CTA takes its next tile of keys. Its consumers have two more to go.
// Where a mask hides blocks, none is left, since their number is not known before.
constexpr int kStepsToTake = 2;

// One thread brings everything of one tile of keys: first the first queries, whose slots are free while the
// consumers still read the keys before. Where a mask hides blocks, its warp finds the steps, and works with
// it.
template <class Config, class Steps>
__device__ __forceinline__ void load_key_tile(const AttentionBackwardParams& p,
                                              const Sm90BackwardLaunch& plan,
                                              const Sm90BackwardWork<Config>& work, Steps& step,
                                              Sm90TileCount at, Sm90BackwardShared<Config>& shared) {
    const bool leads = !Config::kBlocks || threadIdx.x % 32 == 0;
    constexpr uint32_t kLoadingLanes = Config::kBlocks ? (1u << 2 * Config::kParts) - 1 : 1;
    const int32_t key_head = work.kv_head / plan.group_parts;
    auto load_keys = [&](unsigned char* tile, const CUtensorMap& map, uint64_t* full) {
        const int32_t seqlen_k = work.seq.see.seqlen_k;
        ptx::mbarrier_arrive_expect(full, Config::kKeyTileBytes);
#pragma unroll
        for (int block = 0; block < Config::kColumnBlocks; ++block) {
            ptx::tma_load(tile + block * Config::kKeyBlockBytes, &map, full, ptx::kEvictFirst,
                          Config::kBlockColumns * block, key_head, plan.k_edge - seqlen_k + work.first_key,
                          work.k_begin + seqlen_k, p.cu_seqlens_k ? 0 : work.batch);
        }
    };
    auto load_columns = [&](unsigned char* tile, const CUtensorMap& map, uint64_t* full, int first_block,
                            int blocks, int32_t first_key) {
        const int32_t seqlen_k = work.seq.see.seqlen_k;
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
            ptx::tma_load(tile + block * Config::kKeyBlockBytes, &map, full,
                          Config::kBlockColumns * (first_block + block), key_head,
                          plan.k_edge - seqlen_k + first_key, work.k_begin + seqlen_k,
                          p.cu_seqlens_k ? 0 : work.batch);
        }
    };
    // In a cluster, keys of which there are none are not asked for (ptx/tma.h); consumers clear them.
    auto load_keys_of_cluster = [&] {
        constexpr int kBlocks = Config::kOwnBlocks, kBytes = kBlocks * Config::kKeyBlockBytes;
        const int first_block = ptx::cluster_rank() * kBlocks;
        const bool own = work.num_keys > 0, other = work.num_other_keys() > 0;
        ptx::mbarrier_arrive_expect(&shared.k_full,
                                    (own ? Config::kKeyTileBytes + kBytes : 0) + (other ? kBytes : 0));
        ptx::mbarrier_arrive_expect(&shared.v_full, own ? Config::kKeyTileBytes : 0);
        if (own) {
            load_columns(shared.k_rows(), plan.k, &shared.k_full, 0, Config::kColumnBlocks, work.first_key);
            load_columns(shared.v_rows(), plan.v, &shared.v_full, 0, Config::kColumnBlocks, work.first_key);
            load_columns(shared.own_keys(), plan.k, &shared.k_full, first_block, kBlocks, work.first_key);
        }
        if (other) {
            load_columns(shared.other_keys(), plan.k, &shared.k_full, first_block, kBlocks,
                         work.first_other_key());
        }
    };
    // The first query of the sequence, in workspace and in the tensors.
    const int32_t q_outer = query_outer(p, p.q_batch_stride, work.batch),
                  dout_outer = query_outer(p, p.dout_strides.batch, work.batch),
                  first_row = work.workspace_tile * Config::kPartQueries;
    const int32_t first_place = plan.q_edge - work.seq.seqlen_q, shift = work.q_begin + work.seq.seqlen_q;
    const int32_t first_step = step.index;
    bool wants_next = true;
#pragma unroll 1
    do {
        const bool is_first = step.index == first_step;
        if (step.is_left()) {
            if constexpr (Config::kBlocks) step.publish();
            // Where a mask hides blocks, a lane brings one part of Q or of dO.
            const int lane = Config::kBlocks ? threadIdx.x % 32 : 0, part = lane % Config::kParts;
            const int32_t first = step.first_query(part), place = first_place + first,
                          head = step.head_of(part);
            const int32_t row = head * static_cast<int32_t>(plan.num_rows) + first_row + first;
            const uint32_t stage = step.stage();
            auto load = [&](unsigned char* tile, const CUtensorMap& map, int32_t outer, auto* statistics,
                            const void* from, uint64_t* full) {
                constexpr uint32_t kBytes = sizeof(*statistics);
                if (part == 0)
                    ptx::mbarrier_arrive_expect(full, Config::kQueryTileBytes + Config::kQueries * kBytes);
                if (Config::kParts > 1) __syncwarp(kLoadingLanes);
                ptx::bulk_load(statistics + part * Config::kPartQueries,
                               static_cast<const char*>(from) + int64_t{row} * kBytes,
                               Config::kPartQueries * kBytes, full);
                // Each CTA of a cluster brings half of the columns for both.
                if constexpr (Config::kCtas > 1) {
                    const int first_block = ptx::cluster_rank() * Config::kOwnBlocks;
#pragma unroll
                    for (int i = 0; i < Config::kOwnBlocks; ++i) {
                        const int block = first_block + i;
                        ptx::tma_load_multicast(tile + block * Config::kQueryBlockBytes, &map, full,
                                                (1 << Config::kCtas) - 1, Config::kBlockColumns * block, head,
                                                place, shift, outer);
                    }
                } else {
#pragma unroll
                    for (int block = 0; block < Config::kColumnBlocks; ++block) {
                        ptx::tma_load(tile + block * Config::kQueryBlockBytes +
                                          part * Config::kPartQueries * Config::kRowBytes,
                                      &map, full, Config::kBlockColumns * block, head, place, shift, outer);
                    }
                }
            };
            if (kLoadingLanes >> lane & 1) {
                // In a cluster, the last slots are free once K and V, which lie there first, are in
                // registers.
                const bool had_keys = Config::kCtas > 1 && stage == Config::kStages - 1;
                ptx::mbarrier_wait(&shared.q_empty[stage], had_keys ? step.parity() : step.parity() ^ 1);
                if constexpr (Config::kBlocks) {
                    const bool is_q = lane < Config::kParts;
                    load(is_q ? shared.q[stage] : shared.dout[stage], is_q ? plan.q : plan.dout,
                         is_q ? q_outer : dout_outer, is_q ? shared.lse[stage] : shared.delta[stage],
                         is_q ? plan.lse : plan.delta,
                         is_q ? &shared.q_full[stage] : &shared.dout_full[stage]);
                } else {
                    load(shared.q[stage], plan.q, q_outer, shared.lse[stage],
                         terms_of_scores(p, plan, work, step), &shared.q_full[stage]);
                    load(shared.dout[stage], plan.dout, dout_outer, shared.delta[stage], plan.delta,
                         &shared.dout_full[stage]);
                }
            }
            if (Config::kBlocks) __syncwarp();
            step.advance(work);
        }
        if (is_first && leads) {
            ptx::mbarrier_wait(&shared.keys_empty, at.parity() ^ 1);
            if constexpr (Config::kCtas > 1) {
                load_keys_of_cluster();
            } else {
                load_keys(shared.k, plan.k, &shared.k_full);
                load_keys(shared.v, plan.v, &shared.v_full);
            }
        }
        // In time for the next tile of keys to be known when the last queries of this one are loaded, but no
        // sooner, since a CTA that is done earlier should take it.
        if (wants_next && step.left() <= kStepsToTake && leads) {
            wants_next = false;
            ptx::mbarrier_arrive(&shared.tile_wanted);
        }
    } while (step.is_left());
}

// One thread; where a mask hides blocks, a warp.
template <class Config>
__device__ __forceinline__ void run_backward_loader(const AttentionBackwardParams& p,
                                                    const Sm90BackwardLaunch& plan,
                                                    Sm90BackwardShared<Config>& shared) {
    int32_t next_step = 0;
#pragma unroll 1
    for (Sm90TileCount at;; ++at.count) {
        ptx::mbarrier_wait(&shared.tile_full[at.slot()], at.slot_parity());
        const Sm90BackwardWork<Config>& work = shared.tiles[at.slot()];
        if (work.cta_tile < 0) return;
        auto step = [&] {
            if constexpr (Config::kBlocks) {
                return Sm90KeptStepFinder<Config>(p, plan, work, shared, next_step);
            } else if constexpr (Config::kOrdered) {
                return Sm90TurnStep<Config>(work, next_step);
            } else {
                return Sm90BackwardStep<Config>(work, next_step);
            }
        }();
        // Consumers read it when the keys have come.
        if constexpr (Config::kBlocks) {
            if (threadIdx.x % 32 == 0) shared.kept.any[at.slot()] = step.is_left();
        }
        load_key_tile<Config>(p, plan, work, step, at, shared);
        next_step = step.index;
        if (Config::kBlocks) __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.tile_empty[at.slot()]);
    }
}

}  // namespace octavo::cuda
