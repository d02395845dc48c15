// A tile of rows of latent_attention against a run of keys: what the kernels of latent.inl compute.
#pragma once

#include "cpu/forward_tile.h"
#include "params/latent_attention_params.h"

#include <cstdint>

namespace octavo::cpu {

constexpr int kLatentRows = 32;  // at most, a multiple of every kLanes
constexpr int kLatentKeys = 64;

// Rows of one sequence: see LatentSequence.
struct LatentTile {
    LatentSequence sequence;
    int32_t batch_index;
    int32_t first_row;
    int32_t num_rows;  // at most kLatentRows

    int32_t end_key(const LatentAttentionParams& p, int32_t r) const {
        return sequence.end_key(p.causal, (first_row + r) / p.num_q_heads);
    }
};

// Scratch of one thread.
struct alignas(64) LatentScratch {
    float queries[kMaxLatentDim * kLatentRows];  // [dim, row]
    float keys[kLatentKeys * kMaxLatentDim];     // [key, dim]
    float weights[kLatentKeys * kLatentRows];    // [key, row]: scores, then softmax weights
};

struct LatentKernels {
    // Attention of the rows over the keys [first_key, last_key). The result is normalised, with rows of
    // row_stride(v_dim) numbers.
    void (*attend)(const LatentAttentionParams&, const LatentTile&, int32_t first_key, int32_t last_key,
                   LatentScratch&, Partial);
    // Writes the rows to params.out, times out_scale, and to params.lse.
    void (*store)(const LatentAttentionParams&, const LatentTile&, Partial);
};

}  // namespace octavo::cpu
