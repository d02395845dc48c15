// Brings a CTA's queries to shared memory, before its consumers begin.
#pragma once

#include "cuda/latent/round_queries.cuh"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/types.h"

#include <cstdint>
#include <type_traits>

namespace octavo::cuda {

// Copies queries, four lanes each, and zeros where the tile has more rows than there are. The 256 threads of
// the consumers call this.
template <class T, bool kIsFp8>
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
    if constexpr (kIsFp8) {
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
