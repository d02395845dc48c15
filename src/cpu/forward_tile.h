// One tile of rows against a run of key tiles: what the kernels of forward_tile.inl compute.
#pragma once

#include "cpu/row_tile.h"

namespace octavo::cpu {

// The result for some of the keys, normalised: out [num_rows, row_stride(head_dim)], lse [num_rows].
struct Partial {
    float* out;
    float* lse;
};

// Scratch of one thread, with room for any head dim.
struct alignas(64) TileScratch {
    float queries[kTileRows * kMaxHeadDim];  // [row, dim]
    float keys[kMaxHeadDim * kTileKeys];     // [dim, key]
    float values[kTileKeys * kMaxHeadDim];   // [key, dim]
    float weights[kTileRows * kTileKeys];    // [row, key]: scores, then softmax weights
    float out[2][kTileRows * kMaxHeadDim];
    float lse[2][kTileRows];
};

struct ForwardKernels {
    // Attention of the tile's rows over its key tiles [first_key_tile, last_key_tile).
    void (*attend)(const AttentionParams&, const RowTile&, int32_t first_key_tile, int32_t last_key_tile,
                   TileScratch&, Partial);
    // Writes the rows to params.out, times out_scale, and to params.lse.
    void (*store)(const AttentionParams&, const RowTile&, Partial);
};

}  // namespace octavo::cpu
