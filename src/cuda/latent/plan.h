// How latent_attention would work through a batch: which of its three kernels serves, and how it cuts the
// work.
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

// The schedule of Hopper's kernels for batches (schedule.cuh).
constexpr int32_t kMaxLatentScheduleBatch = 1024;  // whose lengths fit into shared memory
constexpr int32_t kLatentScheduleThreads = 384;
// Two numbers for each sequence, one for each warp, and six (LatentScheduleShared).
constexpr int64_t kLatentScheduleBytes =
    (kMaxLatentScheduleBatch * 8 + kLatentScheduleThreads / 32 * 4 + 6 * 4 + 15) / 16 * 16;

// The tiles of sm90_latent. What CTAs that share a sequence leave has to be combined, so that there are no
// more of them than one for each kSm90LatentMinKeys keys or so. A schedule counts kSm90LatentCost pairs of
// tiles more for each sequence.
constexpr int32_t kSm90LatentRows = 64, kSm90LatentKeys = 64, kSm90LatentPairKeys = 2 * kSm90LatentKeys;
constexpr int32_t kSm90LatentThreads = kLatentScheduleThreads;
constexpr int32_t kSm90LatentStages = 2;
constexpr int32_t kSm90LatentMinKeys = 256, kSm90LatentCost = 1;
// The numbers of a partial result (sm90_latent/partials.cuh): sums of all rows, and their softmax states.
constexpr int64_t kSm90LatentSlotNumbers = kSm90LatentRows * (kLatentVDim + 2);
// Room for queries and tiles of keys, nine numbers for each row, the schedule, and ten barriers
// (Sm90LatentShared).
constexpr int64_t kSm90LatentSharedBytes =
    int64_t{2} * kLatentQkDim * (kSm90LatentRows + kSm90LatentStages * kSm90LatentKeys) +
    9 * 4 * kSm90LatentRows + kLatentScheduleBytes + 10 * 8;

// latent_decode: eight warps multiply tiles of keys that four others copy. CTAs that share a sequence have to
// combine their results, so that there are no more of them than one for each kLatentDecodeMinKeys keys or so.
constexpr int32_t latent_decode_keys(bool is_fp8) { return is_fp8 ? 64 : 32; }
constexpr int32_t kLatentDecodeStages = 4;
constexpr int32_t kLatentDecodeConsumers = 256, kLatentDecodeThreads = kLatentScheduleThreads;
constexpr int32_t kLatentDecodeMinKeys = 128;
// The partial results of this many CTAs are added up by one of them.
constexpr int32_t kLatentDecodeFanIn = 12;
// 32-bit words of a CTA's partial results: sums of all rows, and for each warp the softmax states of all
// rows.
constexpr int32_t kLatentDecodePartialWords =
    kLatentRows * kLatentVDim + kLatentDecodeConsumers / 32 * kLatentRows * 2;
// Tiles of keys; what warps exchange, as much as a CTA's partial results, which takes the place of the
// queries; scores of two tiles, in two parts; a number for each row; the schedule; and barriers
// (LatentDecodeShared).
constexpr int64_t latent_decode_shared_bytes(bool is_fp8) {
    const int64_t row = (is_fp8 ? 1 : 2) * kLatentQkDim + kLatentPadBytes, keys = latent_decode_keys(is_fp8);
    return kLatentDecodeStages * (keys * row + 2 * 8) + kLatentDecodePartialWords * 4 +
           2 * 2 * kLatentRows * (keys + 8) * 4 + kLatentRows * 4 + kLatentScheduleBytes;
}

// What the cache of sm90_latent holds: numbers of 16 bits, which the copy engine brings unless pages are too
// small for it (`gathered`), or codes of fp8.
enum class Sm90LatentCache { numbers, gathered, fp8 };

// `latent` runs on all GPUs, the others on Hopper: `sm90_latent` with many rows, `latent_decode` with few.
enum class LatentKernel { latent, sm90_latent, latent_decode };

struct LatentPlan {
    DType dtype, kv_dtype;
    LatentKernel kernel;
    int32_t row;  // a row of kLatentTiles
    int32_t num_sequences, num_q_heads;
    int32_t tiles_per_sequence;  // tiles of rows; a bound when the queries are packed
    int32_t num_splits;          // 0 with a schedule
    int32_t cluster;             // CTAs that combine the results of their splits themselves
    int32_t num_ctas;            // that share out the keys by their lengths; 0 without a schedule
    int64_t total_rows;
    bool q_aligned, kv_aligned;  // whether all rows start at multiples of 16 bytes
    bool gathers;                // sm90_latent over 16 bits: whether keys come one by one

    bool is_fp8() const { return kv_dtype != dtype; }
    Sm90LatentCache cache() const {
        return is_fp8()  ? Sm90LatentCache::fp8
               : gathers ? Sm90LatentCache::gathered
                         : Sm90LatentCache::numbers;
    }
    bool is_scheduled() const { return num_ctas > 0; }
    // Whether CTAs leave partial results in slots of their own, for combine_sm90_latent_kernel.
    bool has_slots() const { return is_scheduled() && kernel == LatentKernel::sm90_latent; }
    const LatentTiles& tiles() const { return kLatentTiles[row]; }
    int32_t rows() const { return kernel == LatentKernel::sm90_latent ? kSm90LatentRows : kLatentRows; }
    int32_t keys() const {
        switch (kernel) {
            case LatentKernel::latent_decode: return latent_decode_keys(is_fp8());
            case LatentKernel::sm90_latent: return kSm90LatentKeys;
            default: return tiles().keys;
        }
    }
    int32_t stages() const {
        switch (kernel) {
            case LatentKernel::latent_decode: return kLatentDecodeStages;
            case LatentKernel::sm90_latent: return kSm90LatentStages;
            default: return tiles().stages;
        }
    }
    int64_t shared_bytes() const {
        switch (kernel) {
            case LatentKernel::latent_decode: return latent_decode_shared_bytes(is_fp8());
            case LatentKernel::sm90_latent: return kSm90LatentSharedBytes;
            default: return tiles().shared_bytes(is_fp8());
        }
    }
    int32_t threads() const {
        switch (kernel) {
            case LatentKernel::latent_decode: return kLatentDecodeThreads;
            case LatentKernel::sm90_latent: return kSm90LatentThreads;
            default: return kLatentThreads;
        }
    }
    int64_t num_row_tiles() const { return int64_t{num_sequences} * tiles_per_sequence; }
    int32_t num_partials() const { return num_splits / cluster; }  // of each row
    Grid grid() const {
        if (is_scheduled()) return {num_ctas};
        return {num_row_tiles() * cluster, num_partials()};
    }
    int64_t num_partial_rows() const { return num_partials() > 1 ? num_partials() * total_rows : 0; }
    // Numbers of partial results in the workspace. With a schedule of sm90_latent, two numbers for each tile
    // of rows follow (LatentRuns).
    int64_t partial_numbers() const {
        if (has_slots()) return 2 * int64_t{num_ctas} * kSm90LatentSlotNumbers;
        return num_partial_rows() * (kLatentVDim + 1);
    }
    int64_t workspace_bytes() const {
        return 4 * (partial_numbers() + (has_slots() ? 2 * num_row_tiles() : 0));
    }
    // Words of the workspace that is zero between launches.
    int64_t workspace_words() const {
        return kernel == LatentKernel::latent_decode ? int64_t{num_ctas} * kLatentDecodePartialWords : 0;
    }
};

LatentPlan plan_latent_attention(const LatentAttentionParams& params, const Gpu& gpu);

Explanation describe(const LatentPlan& plan);

std::vector<std::string> latent_attention_instances();

}  // namespace octavo::cuda
