// What the warps of a CTA of sm90_latent share: named barriers and shared memory, over 16 bits and over fp8.
#pragma once

#include "cuda/latent/plan.h"

#include <cstdint>

namespace octavo::cuda {

// Named barriers. kQueries: queries are in shared memory; kSums: the last maxima and sums are; kOfWarpgroup +
// w is for warpgroup w alone. Over fp8, for each pair of tiles, warpgroup 0 arrives at kWeightsOfEven, where
// warpgroup 1 waits, and then warpgroup 1 at kWeightsOfOdd, where warpgroup 0 waits, if there is an odd tile.
// compute-sanitizer's racecheck does not know such barriers: it reports max, factor, sum and query_unit, each
// of which is written on one side of a barrier and read on the other, and keys that the converter wrote where
// results of the other CTA of the cluster come to lie later.
enum Sm90LatentBarrier : int { kWeightsOfEven = 1, kWeightsOfOdd, kQueries, kSums, kOfWarpgroup };

// 64 columns of queries, keys or weights, with 128-byte swizzle.
struct Sm90LatentBlock {
    unsigned char rows[64][128];
};
// Of a tile: the values are halves of four blocks each, behind which the rotary part lies.
constexpr int kSm90LatentBlocks = kLatentQkDim / 64, kSm90LatentHalfBlocks = kLatentVDim / 128;

// Over 16 bits.
struct Sm90LatentShared {
    // The last 16 columns of queries that are not rotary: pieces of eight columns, those of the first eight
    // first. Registers have the other ones.
    struct LastQueries {
        unsigned char pieces[2][64][16];
    };
    struct Sums {  // when there are no more scores to compute
        float max[64], sum[64];
        float2 peer_state[64];  // the maximum and the sum of a row in the other CTA of the cluster
    };
    Sm90LatentBlock keys[kSm90LatentStages][kSm90LatentBlocks];
    union {
        Sm90LatentBlock rotary_queries;
        Sums sums;
    };
    LastQueries last_queries;
    float factor[kSm90LatentStages][64];  // what sums from before a tile are multiplied by
    // Barriers of a tile's halves, and of its weights.
    uint64_t full[kSm90LatentStages][2], empty[kSm90LatentStages][2], full_weights[kSm90LatentStages];

    // Weights lie where the rotary part of their tile was, since the rotary part is needed for scores alone.
    __device__ Sm90LatentBlock& weights(int stage) { return keys[stage][kSm90LatentBlocks - 1]; }
    // Queries on their way to registers lie where the last one of the first tiles comes.
    __device__ Sm90LatentBlock& queries(int block) {
        return block == kSm90LatentBlocks - 1 ? rotary_queries : keys[kSm90LatentStages - 1][block];
    }
    __device__ float2* peer_state() { return sums.peer_state; }
};

// Over fp8.
struct Sm90LatentFp8Shared {
    Sm90LatentBlock q[kSm90LatentBlocks];
    Sm90LatentBlock keys[kSm90LatentFp8Stages][kSm90LatentBlocks];
    float max[2][64];
    float factor[2][64];  // what sums from before a tile are multiplied by
    float sum[2][64];
    float query_unit[64];              // what a row of q was divided by
    float2 peer_states[64];            // the maximum and the sum of a row in the other CTA of the cluster
    uint64_t full[2][2], empty[2][2];  // barriers of a tile's halves

    __device__ Sm90LatentBlock& weights(int tile) { return keys[tile][kSm90LatentBlocks - 1]; }
    __device__ Sm90LatentBlock& queries(int block) { return q[block]; }
    __device__ float2* peer_state() { return peer_states; }
};

}  // namespace octavo::cuda
