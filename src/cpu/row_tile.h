// Tiles of queries and of keys, as the kernels of forward and backward cut them.
#pragma once

#include "cpu/chosen_keys.h"
#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cpu {

constexpr int kTileRows = 96;  // at most
constexpr int kTileKeys = 64;

// Rows of one KV head and one sequence: row i is of query token i / group_size and of the (i % group_size)-th
// head of the group, so that a group shares each tile of keys.
struct RowTile {
    RangedSlice sequence;
    int32_t batch_index;
    int32_t group_size;
    int32_t kv_head;
    int32_t first_row;
    int32_t num_rows;                    // at most kTileRows where a kernel holds them all
    const ChosenKeys* chosen = nullptr;  // of its KV head: keys are counted among them; null: all are read

    // The query token and the head of the r-th row of the tile.
    int32_t token_of(int32_t r) const { return (first_row + r) / group_size; }
    int32_t head_of(int32_t r) const { return kv_head * group_size + (first_row + r) % group_size; }
    int32_t q_pos_of(int32_t r) const { return sequence.q_pos(token_of(r)); }

    KeyTiles key_tiles() const {
        if (!chosen) return KeyTiles(sequence.see, q_pos_of(0), q_pos_of(num_rows - 1), kTileKeys);
        const int32_t begin = window_begin(q_pos_of(0));
        Visibility from_begin{};  // of a query there that sees no key before its own
        from_begin.seqlen_k = window_end(q_pos_of(num_rows - 1));
        from_begin.window_right = -1;
        return KeyTiles(from_begin, begin, begin, kTileKeys);
    }

    // The window of the query at `q_pos`, as keys are counted.
    int32_t window_begin(int32_t q_pos) const {
        const int32_t begin = sequence.see.window_begin(q_pos);
        return chosen ? chosen->first_from(begin) : begin;
    }
    int32_t window_end(int32_t q_pos) const {
        const int32_t end = sequence.see.window_end(q_pos);
        return chosen ? chosen->first_from(end) : end;
    }
};

// Whether block_mask keeps the keys from k_begin on, which are of one block, for row r of a tile.
inline bool keeps_block(const AttentionParams& p, const RowTile& tile, int32_t r, int32_t k_begin) {
    return p.block_mask.sees(tile.batch_index, tile.head_of(r), tile.token_of(r), k_begin);
}
inline bool keeps_some_block(const AttentionParams& p, const RowTile& tile, int32_t k_begin) {
    if (!p.block_mask) return true;
    for (int32_t r = 0; r < tile.num_rows; ++r) {
        if (keeps_block(p, tile, r, k_begin)) return true;
    }
    return false;
}

// Rows in scratch memory are padded to whole vectors of the widest instruction set.
constexpr int row_stride(int head_dim) { return (head_dim + 15) / 16 * 16; }

}  // namespace octavo::cpu
