// Whose turn it is, where sums of dQ take the parts of tiles of keys in one order (turns.cuh).
#pragma once

#include "common/query_range.h"

#include <cstdint>

namespace octavo::cuda {

// The tile of keys whose turn comes before that of the `own`-th one of a sequence, with tiles of kKeys keys
// and of kQueries queries. They rise or fall, as TurnOrder says. Since the tiles of keys that walk a tile of
// queries follow one another (can_take_turns), the first of them finds that the one before does not walk it.
template <int kKeys, int kQueries>
struct TurnBefore {
    int32_t key_tile;
    int32_t begin, end;  // the tiles of queries that it walks

    OCTAVO_HD TurnBefore(const Visibility& see, int32_t seqlen_q, int32_t own, bool rises)
        : key_tile(own + (rises ? -1 : 1)), begin(0), end(0) {
        const int32_t key = key_tile * kKeys, keys_left = see.seqlen_k - key;
        if (key < 0 || keys_left <= 0) return;
        const QueryRange queries(see, seqlen_q, key, key + (keys_left < kKeys ? keys_left : kKeys));
        if (queries.begin >= queries.end) return;
        begin = queries.begin / kQueries;
        end = (queries.end + kQueries - 1) / kQueries;
    }
    OCTAVO_HD bool walks(int32_t query_tile) const { return query_tile >= begin && query_tile < end; }
};

// Whether the tiles of keys that walk a tile of queries follow one another: a prefix and a window that leaves
// first keys out may have others between them.
inline bool can_take_turns(bool has_prefix, int32_t window_left) { return !has_prefix || window_left < 0; }

}  // namespace octavo::cuda
