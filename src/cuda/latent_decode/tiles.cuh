// The tiles of latent_decode, and what the warps of a CTA share.
#pragma once

#include "cuda/latent/plan.h"
#include "cuda/latent/schedule.cuh"
#include "cuda/types.h"

#include <cstdint>
#include <type_traits>

namespace octavo::cuda {

// The named barrier at which the warps that multiply wait for each other.
constexpr int kConsumersBarrier = 1;

template <class T, bool kIsFp8>
struct LatentDecodeConfig {
    using Type = T;                                         // of queries and results
    using Number = std::conditional_t<kIsFp8, float16, T>;  // of products: float16 has all numbers of fp8
    using Stored = std::conditional_t<kIsFp8, uint8_t, T>;  // of the cache
    static constexpr bool kFp8 = kIsFp8;
    static constexpr int kKeys = latent_decode_keys(kIsFp8), kStages = kLatentDecodeStages;
    static constexpr int kWarps = kLatentDecodeConsumers / 32;  // that multiply
    static constexpr int kRowBytes = kLatentQkDim * static_cast<int>(sizeof(Stored));
    static constexpr int kRowStride = kRowBytes + kLatentPadBytes;
    static constexpr int kQueryStride = 2 * kLatentQkDim + kLatentPadBytes;
    // Scores: a warp has a quarter of the keys, and half of the numbers of each.
    static constexpr int kKeyGroups = 4, kDepthParts = kWarps / kKeyGroups;
    static constexpr int kGroupKeys = kKeys / kKeyGroups, kGroupTiles = kGroupKeys / 8;
    static constexpr int kSteps = kLatentQkDim / 16 / kDepthParts;
    static constexpr int kScoreStride = kKeys + 8;  // elements; four rows lie in different banks
    // Values: a warp has half of the keys, and a quarter of the columns.
    static constexpr int kKeyParts = 2, kColumnParts = kWarps / kKeyParts;
    static constexpr int kPartKeys = kKeys / kKeyParts, kPartSteps = kPartKeys / 16;
    static constexpr int kColumns = kLatentVDim / kColumnParts, kColumnTiles = kColumns / 8;
    // A finished row lies in the registers of all warps, each with half of a column part.
    static constexpr int kOwnTiles = kColumnTiles / kKeyParts;
    static_assert(kDepthParts == 2);
};

template <class Config>
using LatentDecodeSchedule = LatentSchedule<Config::kKeys, kLatentDecodeMinKeys / Config::kKeys, 0>;

template <class Config>
struct LatentDecodeShared {
    unsigned char tiles[Config::kStages][Config::kKeys * Config::kRowStride];
    union {
        unsigned char queries[kLatentRows * Config::kQueryStride];  // of 16-bit numbers
        struct {  // what a warp leaves for the one with the same columns and the other keys
            float4 sums[Config::kWarps][Config::kOwnTiles][32];
            float2 states[Config::kWarps][kLatentRows];  // maximum and sum of each row
        } exchange;
    };
    float scores[2][Config::kDepthParts][kLatentRows][Config::kScoreStride];
    float query_unit[kLatentRows];  // what a row of q was divided by
    LatentScheduleShared schedule;
    uint64_t full[Config::kStages], empty[Config::kStages];  // barriers of the tiles
};

}  // namespace octavo::cuda
