// The rows and keys of one CTA of sm90_latent.
#pragma once

#include "cuda/latent/parameters.h"
#include "cuda/latent/plan.h"

#include <cstdint>

namespace octavo::cuda {

struct Sm90LatentWork {
    LatentSequence sequence;
    int32_t b;
    int32_t first_row, num_rows;  // the CTA's first row in its sequence; rows of the whole sequence
    int32_t begin_tile, num_tiles;
    int32_t end_key;  // the last row sees the keys below this one

    __device__ static Sm90LatentWork make(const LatentAttentionParams& p, const LatentLaunch& launch) {
        Sm90LatentWork work;
        const auto row_tile = static_cast<int32_t>(blockIdx.x) / launch.cluster;
        work.b = launch.tiles_per_sequence.quotient(row_tile);
        work.first_row = launch.tiles_per_sequence.remainder(row_tile) * kSm90LatentRows;
        work.sequence = LatentSequence::make(p, work.b);
        work.num_rows = work.sequence.seqlen_q * p.num_q_heads;
        work.end_key = work.first_row < work.num_rows
                           ? work.end_key_of(p, launch, work.first_row + kSm90LatentRows - 1)
                           : 0;
        const int32_t all_tiles = (work.end_key + kSm90LatentKeys - 1) / kSm90LatentKeys;
        const int64_t split = blockIdx.y * launch.cluster + blockIdx.x % launch.cluster;
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
