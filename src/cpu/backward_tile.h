// The gradients of one tile of keys, or of one tile of rows: what the kernels of backward_tile.inl compute.
#pragma once

#include "common/query_range.h"
#include "cpu/row_tile.h"
#include "params/attention_backward_params.h"

namespace octavo::cpu {

// What is known of each row before any product.
struct RowTerms {
    float* lse_log2;  // the log-sum-exp in units of log2(e); inf, which makes every weight 0, for empty rows
    float* delta;     // the dot product of dout and out, less dlse; 0 for empty rows
    float* dsink;     // what the row adds to the gradient of its head's sink; null unless asked for

    RowTerms from(int64_t row) const { return {lse_log2 + row, delta + row, dsink ? dsink + row : nullptr}; }
};

// Tiles of keys that share each load of rows: as many as scratch holds beside rows that fit in a core's
// cache.
constexpr int kMaxBlockTiles = 4;
inline int tiles_per_block(const AttentionParams& p) {
    constexpr int kBlockDims = 256;  // of all tiles, or more of a single one
    const int fitting = kBlockDims / row_stride(p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v);
    return fitting < 1 ? 1 : fitting < kMaxBlockTiles ? fitting : kMaxBlockTiles;
}

// Scratch of one thread, with room for any head dim. `dim`: of values, their gradients and dout that of v.
struct alignas(64) BackwardScratch {
    float queries[kTileRows * kMaxHeadDim];        // [row, dim]
    float douts[kTileRows * kMaxHeadDim];          // [row, dim]
    float keys_by_dim[kMaxHeadDim * kTileKeys];    // [tile, dim, key]
    float values_by_dim[kMaxHeadDim * kTileKeys];  // [tile, dim, key]
    float keys[kMaxHeadDim * kTileKeys];           // [tile, key, dim]
    float dk[kMaxHeadDim * kTileKeys];             // [tile, key, dim]
    float dv[kMaxHeadDim * kTileKeys];             // [tile, key, dim]
    float weights[kTileRows * kTileKeys];          // [row, key]: scores, then softmax weights after dropout
    float dscores[kTileRows * kTileKeys];          // [row, key]: gradients of the weights, then of the scores
    float dq[kTileRows * kMaxHeadDim];             // [row, dim]
};

// Rows are padded to row_stride() of their dims. `terms` are those of the tile's rows, from the first.
struct BackwardKernels {
    void (*prepare)(const AttentionBackwardParams&, const RowTile&, RowTerms terms);
    // Writes dk and dv of a block of keys, tiles_per_block() tiles from k_begin on, from all rows of
    // their KV head. Adds what these keys give to dq [row, dim], without softmax_scale, and to dslopes
    // [group_size], unless null.
    void (*key_gradients)(const AttentionBackwardParams&, const RowTile& all_rows, int32_t k_begin,
                          RowTerms terms, BackwardScratch&, float* dq, double* dslopes);
    // dq of a tile's rows from all keys: by adding in the same order, with the same bits.
    void (*query_gradients)(const AttentionBackwardParams&, const RowTile&, RowTerms terms, BackwardScratch&,
                            float* dq);
    // Writes dq [row, dim] of rows to params.dq, times softmax_scale.
    void (*store_query_gradients)(const AttentionBackwardParams&, const RowTile&, const float* dq);
};

}  // namespace octavo::cpu
