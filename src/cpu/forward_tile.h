// One tile of rows against a run of key tiles: what the kernels of forward_tile.inl compute, one build of
// them for each instruction set.
#pragma once

#include "cpu/with_type.h"
#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cpu {

constexpr int kTileRows = 96;  // at most
constexpr int kTileKeys = 64;

// Rows of one KV head and one sequence: row i is of query token i / group_size and of the (i % group_size)-th
// head of the group, so that a group shares each tile of keys.
struct RowTile {
    SequenceSlice sequence;
    int32_t batch_index;
    int32_t group_size;
    int32_t kv_head;
    int32_t first_row;
    int32_t num_rows;  // at most kTileRows

    // Of the r-th row of the tile.
    int32_t token_of(int32_t r) const { return (first_row + r) / group_size; }
    int32_t head_of(int32_t r) const { return kv_head * group_size + (first_row + r) % group_size; }
    int32_t q_pos_of(int32_t r) const { return sequence.q_pos(token_of(r)); }

    KeyTiles key_tiles() const {
        return KeyTiles(sequence.see, q_pos_of(0), q_pos_of(num_rows - 1), kTileKeys);
    }
};

// The result for some of the keys, normalised: out [num_rows, row_stride(head_dim)], lse [num_rows].
struct Partial {
    float* out;
    float* lse;
};

// Rows in scratch memory are padded to whole vectors of the widest instruction set.
constexpr int row_stride(int head_dim) { return (head_dim + 15) / 16 * 16; }

// Scratch of one thread, with room for any head dim.
struct alignas(64) TileScratch {
    float queries[kTileRows * kMaxHeadDim];  // [row, dim]
    float keys[kMaxHeadDim * kTileKeys];     // [dim, key]
    float values[kTileKeys * kMaxHeadDim];   // [key, dim]
    float weights[kTileRows * kTileKeys];    // [row, key]: scores, then softmax weights
    float out[2][kTileRows * kMaxHeadDim];
    float lse[2][kTileRows];
};

struct TileKernels {
    // Attention of the tile's rows over its key tiles [first_key_tile, last_key_tile).
    void (*attend)(const AttentionParams&, const RowTile&, int32_t first_key_tile, int32_t last_key_tile,
                   TileScratch&, Partial);
    // Writes the rows to params.out, times out_scale, and to params.lse.
    void (*store)(const AttentionParams&, const RowTile&, Partial);
};

namespace baseline {
extern const TileKernels kKernels;
}
namespace avx2 {
extern const TileKernels kKernels;
}
namespace avx512 {
extern const TileKernels kKernels;
}

}  // namespace octavo::cpu
