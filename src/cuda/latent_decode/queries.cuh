// Brings the queries of a sequence to shared memory.
#pragma once

#include "cuda/latent/round_queries.cuh"
#include "cuda/latent_decode/tiles.cuh"
#include "cuda/types.h"

#include <cstdint>
#include <type_traits>

namespace octavo::cuda {

// Copies queries, 16 lanes each, and zeros where there are fewer than 16 rows. All consumers call it
// together.
template <class Config>
__device__ void copy_latent_queries(const LatentAttentionParams& p, const LatentLaunch& launch,
                                    const LatentSequence& sequence, LatentDecodeShared<Config>& shared) {
    using T = typename Config::Type;
    constexpr int kLanes = kLatentDecodeConsumers / kLatentRows, kRowChunks = kLatentQkDim / 8;
    constexpr int kChunks = (kRowChunks + kLanes - 1) / kLanes;
    const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    uint4 chunks[kChunks] = {};
    if (row < sequence.seqlen_q * p.num_q_heads) {
        const int64_t token = sequence.first_q + launch.num_q_heads.quotient(row);
        const int64_t head = launch.num_q_heads.remainder(row);
        const auto* const from = reinterpret_cast<const uint4*>(
            static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            if (kLanes * i + lane < kRowChunks) chunks[i] = from[kLanes * i + lane];
        }
    }
    if constexpr (Config::kFp8) {
        float unit = 1.0f;
        if constexpr (std::is_same_v<T, bfloat16>) unit = round_to_float16<kLanes>(chunks);
        if (lane == 0) shared.query_unit[row] = unit;
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
        const int chunk = kLanes * i + lane;
        if (chunk >= kRowChunks) continue;
        unsigned char* const to = shared.queries + row * Config::kQueryStride;
        if constexpr (Config::kFp8) {
            // Of each 16 numbers, those in which codes enter first (products.cuh) come before the others.
            unsigned char* const first = to + chunk / 2 * 32 + chunk % 2 * 8;
            *reinterpret_cast<uint2*>(first) = make_uint2(chunks[i].x, chunks[i].z);
            *reinterpret_cast<uint2*>(first + 16) = make_uint2(chunks[i].y, chunks[i].w);
        } else {
            *reinterpret_cast<uint4*>(to + 16 * chunk) = chunks[i];
        }
    }
}

}  // namespace octavo::cuda
