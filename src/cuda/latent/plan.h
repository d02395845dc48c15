// How latent_attention would work through a batch: which of its two kernels serves, and how it cuts the work.
#pragma once

#include "cuda/gpu.h"
#include "cuda/plan.h"
#include "params/latent_attention_params.h"

#include <cstdint>
#include <string>
#include <vector>

namespace octavo::cuda {

constexpr int32_t kLatentQkDim = 576, kLatentVDim = 512;  // the dims that there are kernels for

// Rows in shared memory are this much longer than their data, so that the eight rows that ldmatrix reads at
// once lie in different banks.
constexpr int32_t kLatentPadBytes = 16;

// The kernel for all GPUs: a CTA has 16 rows, and `stages` tiles of keys are in flight or in use.
constexpr int32_t kLatentRows = 16;
constexpr int32_t kLatentThreads = 256;
struct LatentTiles {
    int32_t keys;
    int32_t stages;

    // The shared memory of a CTA: tiles as the cache holds them, and for fp8 one more as 16-bit numbers;
    // scores and weights; and two numbers for each row.
    constexpr int64_t shared_bytes(bool is_fp8) const {
        const int64_t row = 2 * kLatentQkDim + kLatentPadBytes, code_row = kLatentQkDim + kLatentPadBytes;
        const int64_t cache = is_fp8 ? keys * (stages * code_row + row) : keys * stages * row;
        const int64_t scores = int64_t{kLatentRows} * (keys + 8) * 4 * (64 / keys);
        const int64_t weights = int64_t{kLatentRows} * (keys + 8) * 2;
        return cache + scores + weights + kLatentRows * 2 * 4;
    }
};
// The best row comes first. The first one that fits into shared memory is taken.
constexpr LatentTiles kLatentTiles[] = {{64, 3}, {64, 2}, {32, 2}};

// The tiles of sm90_latent, over 16 bits and over fp8.
constexpr int32_t kSm90LatentRows = 64, kSm90LatentKeys = 64;
constexpr int32_t kSm90LatentThreads = 384;
constexpr int32_t kSm90LatentStages = 3, kSm90LatentFp8Stages = 2;
// Room for tiles of keys, some of the queries, three numbers for each row and 15 barriers (Sm90LatentShared).
constexpr int64_t kSm90LatentSharedBytes =
    int64_t{2} * (kLatentQkDim * kSm90LatentStages * kSm90LatentKeys + (64 + 16) * kSm90LatentRows) +
    3 * 4 * kSm90LatentRows + 15 * 8;
// Room for queries and tiles of keys, nine numbers for each row, and eight barriers (Sm90LatentFp8Shared).
constexpr int64_t kSm90LatentFp8SharedBytes =
    int64_t{2} * kLatentQkDim * (kSm90LatentRows + kSm90LatentFp8Stages * kSm90LatentKeys) +
    9 * 4 * kSm90LatentRows + 8 * 8;

struct LatentPlan {
    DType dtype, kv_dtype;
    bool is_sm90;  // whether sm90_latent runs; otherwise the kernel for all GPUs does
    int32_t row;   // a row of kLatentTiles
    int32_t num_sequences, num_q_heads;
    int32_t tiles_per_sequence;  // tiles of rows; a bound when the queries are packed
    int32_t num_splits;
    int32_t cluster;  // CTAs that combine the results of their splits themselves
    int64_t total_rows;
    bool q_aligned, kv_aligned;  // whether all rows start at multiples of 16 bytes

    bool is_fp8() const { return kv_dtype != dtype; }
    const LatentTiles& tiles() const { return kLatentTiles[row]; }
    int32_t rows() const { return is_sm90 ? kSm90LatentRows : kLatentRows; }
    int32_t keys() const { return is_sm90 ? kSm90LatentKeys : tiles().keys; }
    int32_t stages() const { return is_sm90 ? sm90_stages() : tiles().stages; }
    int32_t sm90_stages() const { return is_fp8() ? kSm90LatentFp8Stages : kSm90LatentStages; }
    int64_t shared_bytes() const { return is_sm90 ? sm90_shared_bytes() : tiles().shared_bytes(is_fp8()); }
    int64_t sm90_shared_bytes() const {
        return is_fp8() ? kSm90LatentFp8SharedBytes : kSm90LatentSharedBytes;
    }
    int32_t threads() const { return is_sm90 ? kSm90LatentThreads : kLatentThreads; }
    int64_t num_row_tiles() const { return int64_t{num_sequences} * tiles_per_sequence; }
    int32_t num_partials() const { return num_splits / cluster; }  // of each row
    Grid grid() const { return {num_row_tiles() * cluster, num_partials()}; }
    int64_t num_partial_rows() const { return num_partials() > 1 ? num_partials() * total_rows : 0; }
    int64_t workspace_bytes() const { return num_partial_rows() * (kLatentVDim + 1) * 4; }
};

LatentPlan plan_latent_attention(const LatentAttentionParams& params, const Gpu& gpu);

Explanation describe(const LatentPlan& plan);

std::vector<std::string> latent_attention_instances();

}  // namespace octavo::cuda
