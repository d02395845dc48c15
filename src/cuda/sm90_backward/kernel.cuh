// The gradients of attention on Hopper's tensor cores (sm_90a), by recomputation.
//
// A CTA takes one tile of keys of one KV head after the other, and walks the tiles of queries that see some
// of its keys, of all heads of the group. dK and dV stay in registers; dQ is summed in workspace, in the L2
// cache where it is small, or has a kernel of its own (query_gradients.cuh).
//
// grid: one CTA for each SM; with roles (tiles.h), a CTA or a cluster for each tile in plan.key_order.
// Schedule and roofline: docs/kernels/attention_backward.md.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/sm90_backward/consumer.cuh"
#include "cuda/sm90_backward/finished_sums.cuh"
#include "cuda/sm90_backward/key_consumer.cuh"
#include "cuda/sm90_backward/loader.cuh"
#include "cuda/sm90_backward/pair_consumer.cuh"
#include "cuda/sm90_backward/role_consumer.cuh"
#include "cuda/sm90_backward/scheduler.cuh"
#include "cuda/sm90_backward/turns.cuh"

namespace octavo::cuda {

template <class T, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sm90_backward_kernel(const __grid_constant__ AttentionBackwardParams p,
                         const __grid_constant__ Sm90BackwardLaunch plan) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<Sm90BackwardShared<Config>*>(shared_bytes);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        shared.init();
        for (const CUtensorMap* map : {&plan.q, &plan.dout, &plan.k, &plan.v, &plan.dk, &plan.dv})
            ptx::tma_prefetch_map(map);
    }
    shared.write_factors();
    __syncthreads();
    if constexpr (Config::kCtas > 1) ptx::cluster_barrier_relaxed();
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    // Calls `work_on` for each tile of keys of the CTA, as its scheduler publishes them.
    auto for_each_tile = [&](auto work_on) {
#pragma unroll 1
        for (Sm90TileCount at;; ++at.count) {
            ptx::mbarrier_wait(&shared.tile_full[at.slot()], at.slot_parity());
            const Sm90BackwardWork<Config>& work = shared.tiles[at.slot()];
            if (work.cta_tile < 0) return;
            work_on(work, at);
        }
    };
    if (group == 0) {
        ptx::lower_registers<Config::kLoaderRegisters>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp == 0 && (Config::kBlocks || threadIdx.x == 0)) run_backward_loader<Config>(p, plan, shared);
        if (warp == 1) run_backward_scheduler<Config>(p, plan, shared);
        if constexpr (Config::kBeside) {
            if (warp >= 2) convert_beside<T, Config>(p, plan, shared.rooms.of_warp[warp - 2]);
        }
        if constexpr (Config::kOrdered) {
            static_assert(Config::kConsumers == 2);
            int32_t steps = 0;
            if (warp >= 2) {
                for_each_tile([&](const Sm90BackwardWork<Config>& work, Sm90TileCount at) {
                    if (threadIdx.x % 32 == 0) keep_turns<Config>(plan, work, warp - 2, steps, shared);
                    steps += work.num_steps;
                    __syncwarp();
                    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.tile_empty[at.slot()]);
                });
            }
        }
    } else if (Config::kDropout && group > Config::kConsumers) {
        ptx::lower_registers<Config::kDrawingRegisters>();
        int32_t steps = 0;
        for_each_tile([&](const Sm90BackwardWork<Config>& work, Sm90TileCount at) {
            draw_dropped<Config>(p, work, steps, shared);
            steps += work.num_steps;
            __syncwarp();
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.tile_empty[at.slot()]);
        });
    } else {
        ptx::raise_registers<Config::kConsumerRegisters>();
        using WithRoles =
            std::conditional_t<Config::kDqApart, Sm90RoleConsumer<T, Config>, Sm90PairConsumer<T, Config>>;
        using WithKeys =
            std::conditional_t<Config::kDqApart, Sm90KeyConsumer<T, Config>, Sm90BackwardConsumer<T, Config>>;
        using Consumer = std::conditional_t<Config::kRoles, WithRoles, WithKeys>;
        typename Consumer::Rings rings;
        for_each_tile([&](const Sm90BackwardWork<Config>& tile, Sm90TileCount at) {
            const Sm90BackwardWork<Config> work = tile;  // in registers
            Consumer(p, plan, work, shared, group - 1, at).run(rings);
        });
        if constexpr (Config::kBeside) {
            ptx::named_barrier_sync(3, 128 * Config::kConsumers);  // tiles of queries are needed no more
            T* const rows = reinterpret_cast<T*>(group == 1 ? shared.q : shared.dout);
            convert_rest<T, Config>(p, plan, rows + threadIdx.x % 128 / 32 * 16 * kConvertedStride<Config>);
        }
    }
    if constexpr (Config::kCtas > 1) {
        __syncwarp();
        ptx::cluster_barrier_relaxed();  // the other CTA may still write here
    }
}

}  // namespace octavo::cuda
