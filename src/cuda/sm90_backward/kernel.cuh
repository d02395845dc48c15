// The gradients of attention on Hopper's tensor cores (sm_90a), by recomputation.
//
// A CTA owns a tile of keys of one KV head and walks the tiles of queries that see some of them, of all heads
// of the group. dK and dV stay in registers; dQ is summed in workspace, in the L2 cache where it is small, or
// has a kernel of its own (query_gradients.cuh).
//
// grid: x key tiles over the batch, y KV heads.
#pragma once

#include "cuda/ptx/grid_dependency.h"
#include "cuda/sm90_backward/consumer.cuh"
#include "cuda/sm90_backward/key_consumer.cuh"
#include "cuda/sm90_backward/loader.cuh"
#include "cuda/sm90_backward/role_consumer.cuh"

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
    __syncthreads();
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    // Each warpgroup finds its work by itself: if all shared the result, it would take registers from each.
    if (group == 0) {
        ptx::lower_registers<Config::kLoaderRegisters>();
        const Sm90BackwardWork<Config> work(p, plan);
        if (work.num_keys == 0) return;
        if (threadIdx.x == 0) run_backward_loader<Config>(p, plan, work, shared);
    } else if (Config::kDropout && group > Config::kConsumers) {
        ptx::lower_registers<Config::kDrawingRegisters>();
        const Sm90BackwardWork<Config> work(p, plan);
        if (work.num_keys > 0) draw_dropped<Config>(p, work, shared);
    } else {
        ptx::raise_registers<Config::kConsumerRegisters>();
        const Sm90BackwardWork<Config> work(p, plan);
        if (work.num_keys == 0) return;
        using Consumer = std::conditional_t<Config::kRoles, Sm90RoleConsumer<T, Config>,
                                            std::conditional_t<Config::kDqApart, Sm90KeyConsumer<T, Config>,
                                                               Sm90BackwardConsumer<T, Config>>>;
        Consumer(p, plan, work, shared, group - 1).run();
    }
}

}  // namespace octavo::cuda
