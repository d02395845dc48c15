// Brings a CTA's queries to shared memory, before its consumers begin.
#pragma once

#include "common/float_bits.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_latent/shared.cuh"
#include "cuda/sm90_latent/work.cuh"
#include "cuda/types.h"

#include <cstdint>
#include <type_traits>

namespace octavo::cuda {

// Rounds a row of bfloat16, of which four lanes have a quarter each, to float16, divided by a power of two
// that brings its largest element near 2^10. Returns this power.
template <int kChunks>
__device__ float round_to_float16(uint4 (&chunks)[kChunks]) {
    auto for_each_word = [&](auto f) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) f(chunks[i].x), f(chunks[i].y), f(chunks[i].z), f(chunks[i].w);
    };
    float largest = 0.0f;
    for_each_word([&](uint32_t word) {
        const float2 pair = unpack<bfloat16>(word);
        largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    });
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    constexpr int32_t kLeastExponent = -40;  // of rows below it, zeros among them
    const int32_t exponent = max(static_cast<int32_t>(__float_as_uint(largest) >> 23) - 127, kLeastExponent);
    const float factor = power_of_two(10 - exponent);
    for_each_word([&](uint32_t& word) {
        const float2 pair = unpack<bfloat16>(word);
        word = pack<float16>(pair.x * factor, pair.y * factor);
    });
    return power_of_two(exponent - 10);
}

// Copies queries, four lanes each, and zeros where the tile has more rows than there are. The 256 threads of
// warpgroups 0 and 1 call this.
template <class T, class Shared>
__device__ void copy_sm90_latent_queries(const LatentAttentionParams& p, const LatentLaunch& launch,
                                         const Sm90LatentWork& work, Shared& shared) {
    constexpr bool kIsFp8 = std::is_same_v<Shared, Sm90LatentFp8Shared>;
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
        if constexpr (std::is_same_v<T, bfloat16>) unit = round_to_float16(chunks);
        if (quarter == 0) shared.query_unit[r] = unit;
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
        const int chunk = 4 * i + quarter;
        if constexpr (!kIsFp8) {
            if (chunk / 2 == kLatentVDim / 16 - 1)
                *reinterpret_cast<uint4*>(shared.last_queries.pieces[chunk % 2][r]) = chunks[i];
        }
        *reinterpret_cast<uint4*>(&shared.queries(chunk / 8).rows[r][(chunk % 8 ^ r % 8) * 16]) = chunks[i];
    }
    ptx::fence_proxy_async();
}

}  // namespace octavo::cuda
