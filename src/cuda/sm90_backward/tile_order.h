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

}  // namespace octavo::cuda
