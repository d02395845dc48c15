// The loader: one thread brings K and V once, and tiles of Q and dO with their statistics as far ahead of the
// consumers as the slots allow.
#pragma once

#include "cuda/ptx/tma.h"
#include "cuda/sm90_backward/shared.cuh"

namespace octavo::cuda {

template <class Config>
__device__ __forceinline__ void run_backward_loader(const AttentionBackwardParams& p,
                                                    const Sm90BackwardLaunch& plan,
                                                    const Sm90BackwardWork<Config>& work,
                                                    Sm90BackwardShared<Config>& shared) {
    const int32_t q_outer = p.cu_seqlens_q ? 0 : work.batch, k_outer = p.cu_seqlens_k ? 0 : work.batch;
    const int32_t seqlen_q = work.seq.seqlen_q, seqlen_k = work.seq.see.seqlen_k;
    shared.see = work.seq.see;
    shared.first_q_pos = work.seq.q_pos(0);
    shared.first_key = work.first_key;
    ptx::mbarrier_arrive_expect(&shared.keys_full, 2 * Config::kKeyTileBytes);
#pragma unroll
    for (int block = 0; block < Config::kColumnBlocks; ++block) {
        const int32_t place = plan.k_edge - seqlen_k + work.first_key, shift = work.k_begin + seqlen_k;
        ptx::tma_load(shared.k + block * Config::kKeyBlockBytes, &plan.k, &shared.keys_full, 64 * block,
                      work.kv_head, place, shift, k_outer);
        ptx::tma_load(shared.v + block * Config::kKeyBlockBytes, &plan.v, &shared.keys_full, 64 * block,
                      work.kv_head, place, shift, k_outer);
    }
    Sm90BackwardStep<Config> step(work);
#pragma unroll 1
    for (; step.index < work.num_steps; step.advance(work)) {
        const int32_t first = step.tile * Config::kQueries;
        const int32_t place = plan.q_edge - seqlen_q + first, shift = work.q_begin + seqlen_q;
        const int64_t row = step.head * plan.num_rows + work.workspace_tile * Config::kQueries + first;
        ptx::mbarrier_wait(&shared.q_empty[step.stage()], step.parity() ^ 1);
        auto load = [&](unsigned char* tile, const CUtensorMap& map, auto& statistics, const void* from,
                        uint64_t* full) {
            constexpr uint32_t kBytes = sizeof(statistics);
            ptx::mbarrier_arrive_expect(full, Config::kQueryTileBytes + kBytes);
            ptx::bulk_load(statistics, static_cast<const char*>(from) + row * (kBytes / Config::kQueries),
                           kBytes, full);
#pragma unroll
            for (int block = 0; block < Config::kColumnBlocks; ++block) {
                ptx::tma_load(tile + block * Config::kQueryBlockBytes, &map, full, 64 * block, step.head,
                              place, shift, q_outer);
            }
        };
        load(shared.q[step.stage()], plan.q, shared.lse[step.stage()], plan.lse,
             &shared.q_full[step.stage()]);
        load(shared.dout[step.stage()], plan.dout, shared.delta[step.stage()], plan.delta,
             &shared.dout_full[step.stage()]);
    }
}

}  // namespace octavo::cuda
