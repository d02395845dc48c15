// What the warps of a CTA of sm90_latent share: named barriers, shared memory, and the CTA's rows and keys.
#pragma once

#include "cuda/latent/parameters.h"
#include "cuda/latent/plan.h"
#include "cuda/latent/schedule.cuh"
#include "cuda/types.h"

#include <cstdint>
#include <type_traits>

namespace octavo::cuda {

// Named barriers. For each pair of tiles, warpgroup 0 arrives at the first, where warpgroup 1 waits, and then
// warpgroup 1 arrives at the second, where warpgroup 0 waits, if there is an odd tile. kOfWarpgroup + w is
// for warpgroup w alone. compute-sanitizer's racecheck does not know such barriers: it reports max, factor,
// sum and query_unit of Sm90LatentShared, each of which is written on one side of a barrier and read on the
// other, and keys that the converter wrote where results of the other CTA of the cluster come to lie later.
enum Sm90LatentBarrier : int { kWeightsOfEven = 1, kWeightsOfOdd, kQueries, kSums, kOfWarpgroup };

// The type in which products are computed: over codes float16, which has all numbers of fp8.
template <class T, Sm90LatentCache kCache>
using Sm90LatentNumber = std::conditional_t<kCache == Sm90LatentCache::fp8, float16, T>;

struct Sm90LatentShared {
    static constexpr int kBlocks = kLatentQkDim / 64, kHalfBlocks = kLatentVDim / 128;
    struct Block {
        unsigned char rows[64][128];  // 64 numbers each, with 128-byte swizzle
    };
    Block q[kBlocks];
    Block keys[2][kBlocks];
    float max[2][64];
    float factor[2][64];  // what sums from before a tile are multiplied by
    float sum[2][64];
    float query_unit[64];   // what a row of q was divided by
    float2 peer_state[64];  // the maximum and the sum of a row in the other CTA of the cluster
    LatentScheduleShared schedule;
    uint64_t full[2][2], empty[2][2];      // barriers of a tile's halves
    uint64_t queries_full, queries_empty;  // beside the copy engine, with a schedule

    // Weights lie where the rotary part of their tile was, since the rotary part is needed for scores alone.
    __device__ Block& weights(int tile) { return keys[tile][kBlocks - 1]; }
};

// The phases of the barriers of both places of tiles, and of the queries. They go on from one work of a CTA
// to the next.
struct Sm90LatentPhases {
    uint32_t bits = 0;

    __device__ uint32_t of(int tile) const { return bits >> tile & 1; }
    __device__ void advance(int tile) { bits ^= 1u << tile; }
    __device__ uint32_t of_queries() const { return of(2); }
    __device__ void advance_queries() { advance(2); }
};

// Runs are counted in pairs of tiles, so that a lone tile, which takes nearly as long as a pair, comes only
// where a sequence ends.
using Sm90LatentSchedule =
    LatentSchedule<kSm90LatentPairKeys, kSm90LatentMinKeys / kSm90LatentPairKeys, kSm90LatentCost>;

// The rows and keys of one CTA, or of one segment of its run.
struct Sm90LatentWork {
    LatentSequence sequence;
    int32_t b;
    int32_t first_row, num_rows;  // the CTA's first row in its sequence; rows of the whole sequence
    int32_t begin_tile, num_tiles;
    int32_t end_key;  // the last row sees the keys below this one

    // The split of a CTA of a grid of splits.
    __device__ static Sm90LatentWork of_split(const LatentAttentionParams& p, const LatentLaunch& launch) {
        const auto row_tile = static_cast<int32_t>(blockIdx.x) / launch.cluster;
        const int32_t b = launch.tiles_per_sequence.quotient(row_tile);
        Sm90LatentWork work(p, launch, b, launch.tiles_per_sequence.remainder(row_tile));
        const int32_t all_tiles = work.all_tiles();
        const int64_t split = blockIdx.y * launch.cluster + blockIdx.x % launch.cluster;
        work.begin_tile = static_cast<int32_t>(all_tiles * split / launch.num_splits);
        work.num_tiles = static_cast<int32_t>(all_tiles * (split + 1) / launch.num_splits) - work.begin_tile;
        return work;
    }
    // A segment, for one of the sequence's tiles of rows, which may not see the segment's last keys.
    __device__ static Sm90LatentWork of_segment(const LatentAttentionParams& p, const LatentLaunch& launch,
                                                const LatentSegment& segment, int32_t row_tile) {
        Sm90LatentWork work(p, launch, segment.sequence, row_tile);
        work.begin_tile = 2 * segment.begin;
        work.num_tiles = max(min(2 * segment.end, work.all_tiles()) - work.begin_tile, 0);
        return work;
    }

    __device__ bool has_rows() const { return first_row < num_rows; }
    __device__ int32_t end_key_of(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  int32_t row) const {
        const int32_t query = launch.num_q_heads.quotient(min(row, num_rows - 1));
        return min(sequence.end_key(p.causal, query), sequence.seqlen_k);
    }
    // How many keys of the i-th tile the last row sees, from the tile's first on: 64 except in the last tile.
    __device__ int32_t keys_of(int32_t i) const {
        return min(end_key - (begin_tile + i) * kSm90LatentKeys, kSm90LatentKeys);
    }

  private:
    __device__ Sm90LatentWork(const LatentAttentionParams& p, const LatentLaunch& launch, int32_t b,
                              int32_t row_tile)
        : sequence(LatentSequence::make(p, b)), b(b), first_row(row_tile * kSm90LatentRows) {
        num_rows = sequence.seqlen_q * p.num_q_heads;
        end_key = has_rows() ? end_key_of(p, launch, first_row + kSm90LatentRows - 1) : 0;
    }
    __device__ int32_t all_tiles() const { return (end_key + kSm90LatentKeys - 1) / kSm90LatentKeys; }
};

}  // namespace octavo::cuda
