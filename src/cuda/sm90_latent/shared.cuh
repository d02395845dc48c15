// What the warps of a CTA of sm90_latent share: named barriers, shared memory, and the CTA's rows and keys.
#pragma once

#include "cuda/latent/parameters.h"
#include "cuda/latent/plan.h"

#include <cstdint>

namespace octavo::cuda {

// Named barriers. For each pair of tiles, warpgroup 0 arrives at the first and waits at the second, and
// warpgroup 1 waits at the first and arrives at the second; then warpgroup 0 arrives at the third, where
// warpgroup 1 waits. They do so even where there is no odd tile, so that neither arrives at a barrier twice
// before the other has been there. kOfWarpgroup + w is for warpgroup w alone. compute-sanitizer's racecheck
// does not know such barriers: it reports max, factor and sum of Sm90LatentShared, each of which is written
// on one side of a barrier and read on the other.
enum Sm90LatentBarrier : int { kMaxOfEven = 1, kWeightsOfOdd, kWeightsOfEven, kSums, kOfWarpgroup };

struct Sm90LatentShared {
    static constexpr int kBlocks = kLatentQkDim / 64, kHalfBlocks = kLatentVDim / 128;
    struct Block {
        unsigned char rows[64][128];  // 64 numbers each, with 128-byte swizzle
    };
    Block q[kBlocks];
    Block keys[2][kBlocks];
    float max[64];
    float factor[2][64];  // the factors that sums from before a tile are multiplied by
    float sum[2][64];
    uint64_t full[2][2], empty[2][2];  // barriers of a tile's halves

    __device__ Block& rotary(int tile) { return keys[tile][kBlocks - 1]; }
};

// The rows and keys of one CTA.
struct Sm90LatentWork {
    LatentSequence sequence;
    int32_t b;
    int32_t first_row, num_rows;  // the CTA's first row in its sequence; rows of the whole sequence
    int32_t begin_tile, num_tiles;
    int32_t end_key;  // the last row sees the keys below this one

    __device__ static Sm90LatentWork make(const LatentAttentionParams& p, const LatentLaunch& launch) {
        Sm90LatentWork work;
        work.b = launch.tiles_per_sequence.quotient(static_cast<int32_t>(blockIdx.x));
        work.first_row =
            launch.tiles_per_sequence.remainder(static_cast<int32_t>(blockIdx.x)) * kSm90LatentRows;
        work.sequence = LatentSequence::make(p, work.b);
        work.num_rows = work.sequence.seqlen_q * p.num_q_heads;
        work.end_key = work.first_row < work.num_rows
                           ? work.end_key_of(p, launch, work.first_row + kSm90LatentRows - 1)
                           : 0;
        const int32_t all_tiles = (work.end_key + kSm90LatentKeys - 1) / kSm90LatentKeys;
        const auto split = static_cast<int64_t>(blockIdx.y);
        work.begin_tile = static_cast<int32_t>(all_tiles * split / launch.num_splits);
        work.num_tiles = static_cast<int32_t>(all_tiles * (split + 1) / launch.num_splits) - work.begin_tile;
        return work;
    }
    __device__ int32_t end_key_of(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  int32_t row) const {
        const int32_t query = launch.num_q_heads.quotient(min(row, num_rows - 1));
        return min(sequence.end_key(p.causal, query), sequence.seqlen_k);
    }
    // How many keys of the i-th tile the last row sees, from the tile's first on: 64 except in the last tile.
    __device__ int32_t keys_of(int32_t i) const {
        return min(end_key - (begin_tile + i) * kSm90LatentKeys, kSm90LatentKeys);
    }
};

}  // namespace octavo::cuda
