// The blocks of an item where a window hides some. Two runs are left: the blocks of the prefix, and those of
// the window; between them is a gap. Where blocks are divided among CTAs and warps they are counted without
// the gap; their places in the sequence count it.
//
//     keys      |prefix        |        hidden        |window                      |
//     counted     0 1 2 3 4 5 6                         7 8 9 ...                  count - 1
//     in place    0 1 2 3 4 5 6                         18 19 20 ...               (a gap of 11 blocks)
#pragma once

#include "cuda/decode/item.cuh"

namespace octavo::cuda {

// Keys [begin, end) of a sequence.
struct KeyRange {
    int32_t begin, end;
};

struct VisibleBlocks {
    int32_t count;                  // without the gap
    int32_t gap_begin, gap_blocks;  // the gap's first block, counted either way; how many blocks it has
    int32_t prefix_len;             // keys before it are visible to all queries,
    int32_t window_begin;           // and keys from here on to some of them

    // All blocks: without a window or a prefix, nothing depends on the queries.
    template <int kBlockKeys>
    __device__ static VisibleBlocks all(int32_t seqlen_k) {
        const auto length = static_cast<uint32_t>(seqlen_k);
        return {static_cast<int32_t>((length + (kBlockKeys - 1)) / kBlockKeys), 0, 0, 0, 0};
    }
    template <int kBlockKeys>
    __device__ static VisibleBlocks of(const SequenceSlice& seq) {
        const KeyTiles tiles = key_blocks<kBlockKeys>(seq);
        return {tiles.count, tiles.num_prefix_tiles, tiles.first_window_tile - tiles.num_prefix_tiles,
                tiles.prefix_end, tiles.window_begin};
    }

    // The range from the first key that some query sees to the last; there may be a gap in it.
    __device__ KeyRange keys(int32_t seqlen_k) const {
        const int32_t begin = prefix_len > 0 ? 0 : window_begin;
        return {count > 0 ? begin : seqlen_k, seqlen_k};
    }
    // The place in the sequence of block `block`, counted without the gap.
    __device__ int32_t place(int32_t block) const { return block < gap_begin ? block : block + gap_blocks; }
    // Moves `block`, which was reached in steps from `from`, across the gap if that lies between them.
    __device__ int32_t past_gap(int32_t from, int32_t block) const {
        return from < gap_begin && block >= gap_begin ? block + gap_blocks : block;
    }
    // Replaces a key that no query sees by one of the same block that some query sees, since pages of other
    // keys need not exist.
    __device__ int32_t visible_key(int32_t key, int32_t block) const {
        if (key < prefix_len || key >= window_begin) return key;
        return block < gap_begin ? prefix_len - 1 : window_begin;
    }
};

}  // namespace octavo::cuda
