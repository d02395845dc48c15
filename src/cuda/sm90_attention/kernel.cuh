// Attention forward on Hopper's tensor cores (sm_90a): dense, packed or paged.
//
// FlashAttention-3's schedule (Shah et al. 2024) in plain CUDA: one producer warpgroup moves tiles between
// global and shared memory with the copy engine; two to four consumer warpgroups own 64 rows each and
// multiply with wgmma. A consumer's softmax of one tile runs under its own product of the weights before
// with V, and under the products of the other consumers, which take turns at the tensor cores (but not with
// blocks of 64 of a block mask, where each has tiles of its own: passed_tiles.cuh).
//
// Over pages that are too small for the copy engine, the producer's warps gather keys instead (gather.cuh).
// Over pages of codes (quantised numbers), a warpgroup of converters between the two brings K and V, and two
// more of the producer's warps make Q ready for the products.
//
// grid: persistent, one CTA per SM. A CTA, or a cluster of two, takes row tiles from a counter until none is
// left, and owns all keys of each, or one split of them. Schedule and measurements:
// docs/kernels/sm90_attention.md; over codes: docs/kernels/quantised_prefill.md.
#pragma once

#include "cuda/ptx/grid_dependency.h"
#include "cuda/sm90_attention/consumer.cuh"
#include "cuda/sm90_attention/converter.cuh"
#include "cuda/sm90_attention/producer.cuh"
#include "cuda/sm90_attention/query_converter.cuh"

namespace octavo::cuda {

template <class T, class Config>
__device__ __forceinline__ void run_sm90_attention(const AttentionParams& p, const Sm90Launch& plan) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<Sm90Shared<Config>*>(shared_bytes);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        shared.init();
        if constexpr (Config::kHasCodes || Config::kGathers) {
            for (const CUtensorMap* map : {&plan.q, &plan.out}) ptx::tma_prefetch_map(map);
        } else {
            for (const CUtensorMap* map : {&plan.q, &plan.k, &plan.v, &plan.out}) ptx::tma_prefetch_map(map);
        }
    }
    shared.alibi.init();
    __syncthreads();
    if constexpr (Config::kCtas > 1) ptx::cluster_barrier_relaxed();
    if (!Config::kBeside) ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    if (Config::kBeside) ptx::launch_dependents();  // not before all earlier kernels are complete

    if (warp < 4) {
        ptx::lower_registers<Config::kProducerRegisters>();
        if constexpr (Config::kGathers) {
            if (warp < 3)
                run_gatherer<Config, false>(p, plan, shared, warp);
            else
                run_gatherer<Config, true>(p, plan, shared, 3);
        } else {
            if (warp == 0) run_q_k_loader<Config>(p, plan, shared);
            if constexpr (Config::kHasCodes) {
                if (warp % 2 == 1 && warp / 2 < Config::kConsumers)
                    QueryConverter<Config>(p, plan, shared, warp / 2).run();
            } else {
                if (warp == 1) run_v_loader<Config>(p, plan, shared);
                if (warp == 3 && Config::kOwnScheduler) run_scheduler<Config>(p, plan, shared);
            }
            if (warp == 2) run_storer<Config>(p, plan, shared);
        }
    } else if (warp < 4 * Config::kFirstConsumer) {
        if constexpr (Config::kHasCodes) {
            ptx::lower_registers<Config::kConverterRegisters>();
            run_converters<Config>(p, plan, shared, warp / 4 - 1);
        }
    } else {
        ptx::raise_registers<Config::kConsumerRegisters>();
        Sm90Consumer<T, Config>(p, plan, shared, warp / 4 - Config::kFirstConsumer).run();
    }
    if constexpr (Config::kCtas > 1) ptx::cluster_barrier_relaxed();  // the other CTA may still write here
}

template <class T, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sm90_attention_kernel(const __grid_constant__ AttentionParams p,
                          const __grid_constant__ Sm90Launch plan) {
    run_sm90_attention<T, Config>(p, plan);
}

// The same kernel for Sm90Feature::beside: its bound on registers leaves some to CTAs of another kernel.
template <class T, class Config>
__global__ void __maxnreg__(kSm90RegistersBeside)
    sm90_attention_beside_kernel(const __grid_constant__ AttentionParams p,
                                 const __grid_constant__ Sm90Launch plan) {
    run_sm90_attention<T, Config>(p, plan);
}

}  // namespace octavo::cuda
