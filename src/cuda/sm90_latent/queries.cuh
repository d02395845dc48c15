// Brings a CTA's queries to shared memory.
#pragma once

#include "cuda/latent/round_queries.cuh"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/types.h"

#include <cstdint>
#include <type_traits>

namespace octavo::cuda {

// Copies the queries of works whose keys the copy engine brings, by warps that have nothing else to do: those
// of the next work while the rows of the last one are finished.
template <class T>
class Sm90LatentQueryCopier {
  public:
    // `warp`: this one among kWarps that call the same.
    __device__ Sm90LatentQueryCopier(const LatentAttentionParams& p, const LatentLaunch& launch,
                                     Sm90LatentShared& shared, int warp)
        : p_(p), launch_(launch), shared_(shared), first_row_(2 * warp + threadIdx.x % 32 / 16) {}

    static constexpr int kWarps = 3;

    // Half a warp copies a row: zeros where the tile has more rows than there are.
    __device__ void run(const Sm90LatentWork& work, Sm90LatentPhases& phases) const {
        constexpr int kLanes = 16, kChunks = kLatentQkDim / 8;
        const int lane = threadIdx.x % kLanes;
        ptx::mbarrier_wait(&shared_.queries_empty, phases.of_queries() ^ 1);
#pragma unroll 1
        for (int r = first_row_; r < kSm90LatentRows; r += 2 * kWarps) {
            const int32_t row = work.first_row + r, read = min(row, work.num_rows - 1);
            const int64_t token = work.sequence.first_q + launch_.num_q_heads.quotient(read);
            const int64_t head = launch_.num_q_heads.remainder(read);
            const auto* const from = reinterpret_cast<const uint4*>(
                static_cast<const T*>(p_.q) + token * p_.q_token_stride + head * p_.q_head_stride);
#pragma unroll
            for (int i = 0; i < (kChunks + kLanes - 1) / kLanes; ++i) {
                const int chunk = kLanes * i + lane;
                if (chunk < kChunks)
                    ptx::cp_async_16(
                        ptx::shared_address(&shared_.q[chunk / 8].rows[r][(chunk % 8 ^ r % 8) * 16]),
                        from + chunk, row < work.num_rows);
            }
        }
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        ptx::fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared_.queries_full);
        phases.advance_queries();
    }

  private:
    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    Sm90LatentShared& shared_;
    const int first_row_;
};

// Copies the queries of a work, four lanes each, and zeros where the tile has more rows than there are. Over
// fp8 they become float16. The 256 threads of the consumers call this before they begin.
template <class T, Sm90LatentCache kCache>
__device__ void copy_sm90_latent_queries(const LatentAttentionParams& p, const LatentLaunch& launch,
                                         const Sm90LatentWork& work, Sm90LatentShared& shared) {
    constexpr int kChunks = kLatentQkDim / 8 / 4;
    const int r = threadIdx.x / 4, quarter = threadIdx.x % 4;
    uint4 chunks[kChunks] = {};
    if (const int32_t row = work.first_row + r; row < work.num_rows) {
        const int64_t token = work.sequence.first_q + launch.num_q_heads.quotient(row);
        const int64_t head = launch.num_q_heads.remainder(row);
        const auto* const from = reinterpret_cast<const uint4*>(
            static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) chunks[i] = from[4 * i + quarter];
    }
    if constexpr (kCache == Sm90LatentCache::fp8) {
        float unit = 1.0f;
        if constexpr (std::is_same_v<T, bfloat16>) unit = round_to_float16<4>(chunks);
        if (quarter == 0) shared.query_unit[r] = unit;
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
        const int chunk = 4 * i + quarter;
        *reinterpret_cast<uint4*>(&shared.q[chunk / 8].rows[r][(chunk % 8 ^ r % 8) * 16]) = chunks[i];
    }
    ptx::fence_proxy_async();
}

}  // namespace octavo::cuda
