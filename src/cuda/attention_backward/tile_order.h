// In which order the CTAs of a launch take the tiles of a batch.
//
// A pair is a sequence and a head; packed sequences are not told apart, and a pair is a head of them all. The
// tiles of a pair follow one another, and so do pairs, so that CTAs that run at the same time read the same
// queries or keys. The last pairs are mixed: the first tiles of all of them come first, then the second ones.
// A causal mask makes these long and the last ones short, and the short ones fill the gaps at the end of the
// launch.
//
//     3 pairs of 3 tiles, the last 2 mixed:
//     pair 0: tile 0, 1, 2 | pair 1: tile 0, pair 2: tile 0 | 1: 1, 2: 1 | 1: 2, 2: 2
#pragma once

#include "common/macros.h"

#include <algorithm>
#include <cstdint>

namespace octavo::cuda {

struct TileOrder {
    int32_t tiles;    // of each pair
    int32_t pairs;    // over the batch
    int32_t mixed;    // pairs, at the end
    bool last_first;  // whether a pair's last tile comes first

    struct Place {
        int32_t tile, pair;
    };

    OCTAVO_HD int64_t num_ctas() const { return int64_t{tiles} * pairs; }
    // Mixes as many of the last pairs as have `num_tiles`, while four fifths of the L2 cache hold what their
    // tiles read and add to, pair_bytes each.
    void mix(int64_t num_tiles, int64_t l2_bytes, int64_t pair_bytes) {
        const int64_t wanted = (num_tiles + tiles - 1) / tiles;
        const int64_t in_cache = l2_bytes * 4 / 5 / pair_bytes;
        mixed = static_cast<int32_t>(std::min({wanted, in_cache, int64_t{pairs}}));
    }
    OCTAVO_HD Place of(int32_t cta) const {
        int32_t pair = cta / tiles, tile = cta - pair * tiles;
        const int32_t in_order = pairs - mixed;
        if (pair >= in_order) {
            const int32_t place = cta - in_order * tiles;
            tile = place / mixed;
            pair = in_order + place - tile * mixed;
        }
        return {last_first ? tiles - 1 - tile : tile, pair};
    }
};

// The order where sums of a tile of queries take their parts in the order of tiles of keys (turns.cuh): a CTA
// has to find its turn come, so that CTAs which add to the same sums should come by one after the other.
// Pairs are mixed in blocks of `grouped`, but for the last `mixed`. Tiles of keys rise within a pair, and
// each is walked from its last tile of queries on. With falling_first they fall in all blocks but the last
// one, and are walked from their first tile of queries on: under a causal mask that is the diagonal, and
// none comes by where another one is. But the last tile of keys is then the longest one.
struct TurnOrder {
    int32_t tiles;    // of each pair
    int32_t pairs;    // over the batch
    int32_t grouped;  // pairs of a block, of which there are (pairs - mixed) / grouped
    int32_t mixed;    // pairs of the last block
    bool falling_first;

    OCTAVO_HD int32_t tiles_in_blocks() const { return tiles * (pairs - mixed); }
    OCTAVO_HD bool rises(int32_t cta) const { return !falling_first || cta >= tiles_in_blocks(); }
    OCTAVO_HD TileOrder::Place of(int32_t cta) const {
        int32_t first_pair = pairs - mixed, of_block = mixed, place = cta - tiles_in_blocks();
        if (place < 0) {
            of_block = grouped;
            first_pair = cta / (grouped * tiles) * grouped;
            place = cta - first_pair * tiles;
        }
        const int32_t tile = place / of_block;
        return {rises(cta) ? tile : tiles - 1 - tile, first_pair + place - tile * of_block};
    }
};

}  // namespace octavo::cuda
