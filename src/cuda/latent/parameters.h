// What a launch hands to the kernels of latent_attention besides the call's parameters.
#pragma once

#include "common/fast_divide.h"
#include "cuda/partial_words.cuh"

#include <cstdint>

namespace octavo::cuda {

// The runs of a schedule that share the keys of a sequence: the CTA of the first of them for some tile of
// rows, and how many there are.
struct LatentRuns {
    int32_t first_cta, count;
};

struct LatentLaunch {
    FastDivide tiles_per_sequence, num_q_heads, page_size;
    int32_t num_splits;          // 0 with a schedule
    int32_t cluster;             // CTAs that share the keys of a row tile, and combine their results
    int32_t num_partials;        // num_splits / cluster
    bool q_aligned, kv_aligned;  // whether rows move 16 bytes at a time
    // Partial results, if there is more than one of each row: normalised results of every row of [total_q,
    // num_q_heads], and their log-sum-exps. Rows of padding are not written.
    float* partial_out;  // [num_partials, total_rows, kLatentVDim]
    float* partial_lse;  // [num_partials, total_rows]
    // With a schedule of sm90_latent, partial_out has two slots for each CTA (sm90_latent/partials.cuh).
    LatentRuns* runs;  // [tiles of rows]
    // With a schedule of latent_decode: what a CTA pushes for later ones (partial_words.cuh).
    PartialWorkspace partial;
};

}  // namespace octavo::cuda
