// Which keys a query sees, and which tiles of keys a run of queries has to visit.
#pragma once

#include "common/fast_divide.h"
#include "common/macros.h"

#include <cstdint>

namespace octavo {

// Positions are absolute: key j of a sequence is at position j, query i of n at seqlen_k - n + i.
struct Visibility {
    static constexpr bool kHasRanges = false;  // see RangedVisibility
    int32_t seqlen_k;
    int32_t prefix_len;    // keys before it are visible to every query; at most seqlen_k
    int32_t window_left;   // -1: unbounded
    int32_t window_right;  // -1: unbounded; causal: 0
    // The length of chunks of positions: a query sees keys of its own chunk only. 0: there are no chunks;
    // otherwise window_left is less than the length, and window_right is 0.
    FastDivide attention_chunk;

    // The window of the query at `q_pos`, cut to the sequence: keys [window_begin, window_end). Neither end
    // falls as q_pos rises.
    OCTAVO_HD int32_t window_begin(int32_t q_pos) const {
        int32_t begin = window_left < 0 ? 0 : q_pos - window_left;
        if (has_chunks() && q_pos >= 0) begin = later(begin, chunk_begin(q_pos));
        return begin < 0 ? 0 : begin;
    }
    OCTAVO_HD int32_t window_end(int32_t q_pos) const {
        int32_t end = window_right < 0 ? seqlen_k : q_pos + window_right + 1;
        return end > seqlen_k ? seqlen_k : (end < 0 ? 0 : end);
    }
    OCTAVO_HD bool visible(int32_t q_pos, int32_t k_pos) const {
        return k_pos < prefix_len || (k_pos >= window_begin(q_pos) && k_pos < window_end(q_pos));
    }
    // Where a query is in a range of keys that sees in both directions, its window has it as well.
    OCTAVO_HD bool sees_any(int32_t q_pos) const {
        return prefix_len > 0 || window_begin(q_pos) < window_end(q_pos);
    }

    OCTAVO_HD bool has_chunks() const {
        return OCTAVO_RARE(window_left >= 0) && OCTAVO_RARE(attention_chunk.divisor > 0);
    }
    // The chunk [chunk_begin, chunk_end) of a position, which must not be negative; there must be chunks.
    OCTAVO_HD int32_t chunk_begin(int32_t pos) const { return pos - attention_chunk.remainder(pos); }
    OCTAVO_HD int32_t chunk_end(int32_t pos) const {
        return chunk_begin(pos) + static_cast<int32_t>(attention_chunk.divisor);
    }

  private:
    OCTAVO_HD static int32_t later(int32_t a, int32_t b) { return a > b ? a : b; }
};

// The keys that some query of a run sees: [0, prefix_end) and [window_begin, window_end), which may touch
// or overlap, walked in tiles of `tile_size` keys.
struct KeyTiles {
    int32_t tile_size;
    int32_t prefix_end;
    int32_t window_begin, window_end;
    int32_t num_prefix_tiles;
    int32_t first_window_tile;  // not before num_prefix_tiles
    int32_t count;

    KeyTiles() = default;  // nothing is set
    // The queries are at positions [first_q_pos, last_q_pos]. `See` is Visibility or RangedVisibility.
    template <class See>
    OCTAVO_HD KeyTiles(const See& see, int32_t first_q_pos, int32_t last_q_pos, int32_t tile_size)
        : tile_size(tile_size),
          prefix_end(see.prefix_len),
          window_begin(see.window_begin(first_q_pos)),
          window_end(see.window_end(last_q_pos)) {
        if (window_begin > window_end) window_begin = window_end;
        num_prefix_tiles = (prefix_end + tile_size - 1) / tile_size;
        int32_t begin = window_begin / tile_size;
        int32_t end = window_begin < window_end ? (window_end + tile_size - 1) / tile_size : begin;
        first_window_tile = begin > num_prefix_tiles ? begin : num_prefix_tiles;
        count = num_prefix_tiles + (end > first_window_tile ? end - first_window_tile : 0);
    }

    // First key of the i-th tile to visit.
    OCTAVO_HD int32_t start(int32_t i) const {
        return (i < num_prefix_tiles ? i : i - num_prefix_tiles + first_window_tile) * tile_size;
    }

    // Whether some query of the run sees this key. A key that none sees is never loaded.
    OCTAVO_HD bool needed(int32_t k_pos) const {
        return k_pos < prefix_end || (k_pos >= window_begin && k_pos < window_end);
    }

    // Whether every query of the run sees every key of [k_begin, k_begin + tile_size): no mask to apply.
    template <class See>
    OCTAVO_HD static bool all_visible(const See& see, int32_t first_q_pos, int32_t last_q_pos,
                                      int32_t k_begin, int32_t tile_size) {
        return k_begin + tile_size <= see.prefix_len || (k_begin >= see.window_begin(last_q_pos) &&
                                                         k_begin + tile_size <= see.window_end(first_q_pos));
    }
};

}  // namespace octavo
