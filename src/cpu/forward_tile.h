// A tile of rows against a run of key tiles: what the kernels of forward_tile.inl compute.
#pragma once

#include "cpu/row_tile.h"

namespace octavo::cpu {

// The rows of several KV heads from one tile of each: those of the first come first.
struct HeadRun {
    RowTile tile;   // of the first head
    int32_t count;  // of heads, with at most kTileRows rows in all

    int32_t num_rows() const { return count * tile.num_rows; }

    RowTile tile_of(int32_t i) const {
        RowTile result = tile;
        result.kv_head += i;
        return result;
    }
};

// The result for some of the keys, normalised: out [num_rows, row_stride(head_dim_v)], lse [num_rows].
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
    // Attention of the rows over the key tiles [first_key_tile, last_key_tile).
    void (*attend)(const AttentionParams&, const HeadRun&, int32_t first_key_tile, int32_t last_key_tile,
                   TileScratch&, Partial);
    // Writes the rows to params.out, times out_scale, and to params.lse.
    void (*store)(const AttentionParams&, const HeadRun&, Partial);
};

}  // namespace octavo::cpu
