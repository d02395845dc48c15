// What forward and backward do alike with a tile of keys: where it lies, who sees what of it, and scores.
// Included after rows.inl and gemm.inl.

// The keys of a tile that a query, or some query of a run, sees, counted from the tile's first:
// [0, prefix_end) and [window_begin, window_end).
struct VisibleKeys {
    int prefix_end, window_begin, window_end;

    static VisibleKeys all() { return {0, 0, kTileKeys}; }
    static VisibleKeys none() { return {0, 0, 0}; }

    static VisibleKeys make(int32_t k_begin, int32_t prefix_len, int32_t window_begin, int32_t window_end) {
        auto within = [](int32_t low, int32_t x) { return x < low ? low : (x > kTileKeys ? kTileKeys : x); };
        VisibleKeys keys;
        keys.prefix_end = within(0, prefix_len - k_begin);
        keys.window_begin = within(keys.prefix_end, window_begin - k_begin);
        keys.window_end = within(keys.window_begin, window_end - k_begin);
        return keys;
    }

    template <class Body>
    void for_ranges(const Body& body) const {
        if (0 < prefix_end) body(0, prefix_end);
        if (window_begin < window_end) body(window_begin, window_end);
    }
};

// Calls body(begin, end, page, slot) for the keys of a tile that some row sees, cut where pages end: those
// from `begin` on lie in the page from its slot on.
template <class Body>
OCTAVO_SIMD void for_pages(const AttentionParams& p, const RowTile& tile, const VisibleKeys& needed,
                           int32_t k_begin, const Body& body) {
    const IndexArray pages =
        p.paged() ? p.page_table.from(tile.batch_index * p.page_table_stride) : IndexArray{};
    const int32_t page_size = p.paged() ? p.page_size : INT32_MAX;
    needed.for_ranges([&](int begin, int end) {
        for (int j = begin; j < end;) {
            const int32_t slot = (k_begin + j) % page_size;
            const int32_t column = (k_begin + j) / page_size;
            const int64_t page = pages ? pages[tile.chosen ? tile.chosen->pages[column] : column] : 0;
            const int page_end = end - j < page_size - slot ? end : j + page_size - slot;
            body(j, page_end, page, slot);
            j = page_end;
        }
    });
}

// Where the keys of one tile lie, and their values. In place of a key that no row sees, which is never read,
// stands a row of zeros.
template <class K, class V>
struct KeyRows {
    const K* k[kTileKeys];
    const V* v[kTileKeys];
};

template <class K, class V>
static void find_keys(const AttentionParams& p, const RowTile& tile, const KeyTiles& tiles, int32_t k_begin,
                      KeyRows<K, V>& rows) {
    static const K kZeroKey[kMaxHeadDim] = {};
    static const V kZeroValue[kMaxHeadDim] = {};
    const K* k = static_cast<const K*>(p.k) + tile.sequence.k_begin + tile.kv_head * p.k_head_stride;
    const V* v = static_cast<const V*>(p.v) + tile.sequence.v_begin + tile.kv_head * p.v_head_stride;
    const VisibleKeys needed =
        VisibleKeys::make(k_begin, tiles.prefix_end, tiles.window_begin, tiles.window_end);
    auto fill_zeros = [&](int begin, int end) {
        for (int j = begin; j < end; ++j) {
            rows.k[j] = kZeroKey;
            rows.v[j] = kZeroValue;
        }
    };
    fill_zeros(needed.prefix_end, needed.window_begin);
    fill_zeros(needed.window_end, kTileKeys);
    for_pages(p, tile, needed, k_begin, [&](int j, int end, int64_t page, int32_t slot) {
        const K* k_row = k + page * p.k_outer_stride + slot * p.k_token_stride;
        const V* v_row = v + page * p.v_outer_stride + slot * p.v_token_stride;
        for (; j < end; ++j, k_row += p.k_token_stride, v_row += p.v_token_stride) {
            rows.k[j] = k_row;
            rows.v[j] = v_row;
        }
    });
}

// Which keys of a tile each row of a tile of rows sees.
struct TileMask {
    const RowTile& tile;
    const RangedVisibility& see;
    const int32_t* q_pos;  // [num_rows]
    int32_t num_rows;
    int32_t k_begin;
    const uint64_t* tree_words;  // [num_rows], of the keys from tree_begin on; null where they hide none here
    int32_t tree_begin;
    bool all_visible;        // to every row, but for those from which block_mask hides the tile
    bool has_hidden;         // whether it hides the tile from some row
    bool hidden[kTileRows];  // those from which it hides the tile

    // `tree_words`: [num_rows], those of the tree mask, or null.
    static TileMask make(const AttentionParams& p, const RowTile& tile, const int32_t* q_pos, int32_t k_begin,
                         const uint64_t* tree_words = nullptr) {
        static_assert(kTileKeys <= kMaxTreeTokens, "a tile's keys have a bit each");
        const RangedVisibility& see = tile.sequence.see;
        const int32_t tree_begin = tile.sequence.q_pos(0);
        if (k_begin + kTileKeys <= tree_begin) tree_words = nullptr;
        const int32_t first_q_pos = q_pos[0], last_q_pos = q_pos[tile.num_rows - 1];
        const bool all_visible =
            !tree_words &&
            (tile.chosen ? tile.window_begin(last_q_pos) <= k_begin &&
                               k_begin + kTileKeys <= tile.window_end(first_q_pos)
                         : KeyTiles::all_visible(see, first_q_pos, last_q_pos, k_begin, kTileKeys));
        TileMask mask{tile,       see,        q_pos,       tile.num_rows, k_begin,
                      tree_words, tree_begin, all_visible, false,         {}};
        if (!p.block_mask) return mask;
        for (int32_t r = 0; r < tile.num_rows; ++r) {
            mask.hidden[r] = !keeps_block(p, tile, r, k_begin);
            mask.has_hidden |= mask.hidden[r];
        }
        return mask;
    }

    // Whether block_mask hides all of the tile from row r.
    bool hides_from(int32_t r) const { return has_hidden && hidden[r]; }
    // Whether both rows see the same keys.
    bool alike(int32_t r, int32_t other) const {
        if (has_hidden && hidden[r] != hidden[other]) return false;
        return all_visible || q_pos[r] == q_pos[other];
    }
    // Calls body(begin, end) for the runs of rows that see the same keys: all, or those of one query token.
    template <class Body>
    void for_alike(const Body& body) const {
        for (int r = 0, end; r < num_rows; r = end) {
            for (end = r + 1; end < num_rows && alike(r, end);) ++end;
            body(r, end);
        }
    }
    // The keys that the tree mask hides from row r, a bit each.
    uint64_t hidden_from(int32_t r) const {
        return tree_words ? hidden_by_tree(tree_words[r], tree_begin, see.prefix_len, k_begin) : 0;
    }

    VisibleKeys visible_to(int32_t r) const {
        if (hides_from(r)) return VisibleKeys::none();
        if (all_visible) return VisibleKeys::all();
        return VisibleKeys::make(k_begin, see.prefix_len, tile.window_begin(q_pos[r]),
                                 tile.window_end(q_pos[r]));
    }

    // Calls body(begin, end) for the runs of keys that row r sees.
    template <class Body>
    void for_ranges(int32_t r, const Body& body) const {
        const uint64_t hidden = hidden_from(r);
        visible_to(r).for_ranges([&](int begin, int end) {
            if (hidden == 0) return body(begin, end);
            for (int j = begin; j < end;) {
                if (hidden >> j & 1) {
                    ++j;
                    continue;
                }
                const int first = j;
                while (j < end && !(hidden >> j & 1)) ++j;
                body(first, j);
            }
        });
    }
};

// out [num_rows, stride] += weights [num_rows, kTileKeys] * values [kTileKeys, stride]. What a row does not
// see is left out, not multiplied by zero: it may hold NaN.
static void add_values(const TileMask& mask, const float* weights, const float* values, int stride,
                       float* out) {
    mask.for_alike([&](int r, int end) {
        mask.for_ranges(r, [&](int begin, int visible_end) {
            multiply({weights + r * kTileKeys + begin, kTileKeys, values + begin * stride, stride,
                      out + r * stride, stride, end - r, stride, visible_end - begin, Into::chained});
        });
    });
}

OCTAVO_SIMD Vec transform_score(const ScoreTransform& t, Vec qk) {
    return t.has_softcap ? t.outer * tanh(qk * t.inner) : qk * t.inner;
}

// Turns one row of dot products into scores, but for ALiBi.
static void transform_row(float* row, const ScoreTransform& transform) {
    for (int j = 0; j < kTileKeys; j += kLanes) store(row + j, transform_score(transform, load(row + j)));
}

// ALiBi of a query head.
struct Alibi {
    float slope_log2;  // in units of log2(e); 0: none
    bool is_symmetric;

    static Alibi make(const AttentionParams& p, const RowTile& tile, int32_t r) {
        if (!p.alibi_slopes) return {0.0f, false};
        const float* const slopes = p.alibi_slopes + tile.batch_index * p.alibi_batch_stride;
        return {slopes[tile.head_of(r)] * kLog2e, p.alibi_symmetric};
    }

    // To a row of scores.
    void add(float* row, int32_t q_pos, int32_t k_begin, const ChosenKeys* chosen = nullptr) const {
        if (slope_log2 == 0.0f) return;
        auto position = [&](int j) { return chosen ? chosen->position(k_begin + j) : k_begin + j; };
        if (is_symmetric) {
            for (int j = 0; j < kTileKeys; ++j)
                row[j] -= slope_log2 * fabsf(static_cast<float>(q_pos - position(j)));
        } else {
            for (int j = 0; j < kTileKeys; ++j) row[j] += alibi_bias(slope_log2, q_pos, position(j));
        }
    }
};

// Calls drop(j) for each key of a tile whose weight dropout leaves out of a query's row.
template <class Drop>
OCTAVO_SIMD void for_dropped(const Dropout& dropout, uint64_t head, int32_t query, int32_t k_begin,
                             const Drop& drop) {
    static_assert(kTileKeys % 32 == 0);
    for (int32_t n = 0; n < kTileKeys / 32; ++n) {
        for (int32_t pair = 0; pair < 4; ++pair) {
            const Philox random = dropout.bits(head, query, k_begin / 32 + n, pair);
            for (int w = 0; w < 4; ++w) {
                const int j = 32 * n + 8 * w + 2 * pair;
                if (dropout.drops_even(random.words[w])) drop(j);
                if (dropout.drops_odd(random.words[w])) drop(j + 1);
            }
        }
    }
}

// Loads rows of an array like q to [num_rows, row_stride(head_dim)]. `first` is the first of its sequence.
template <class T>
static void load_tile_rows(const RowTile& tile, const T* first, int64_t token_stride, int64_t head_stride,
                           int head_dim, float* to) {
    for (int r = 0; r < tile.num_rows; ++r, to += row_stride(head_dim)) {
        load_row(first + tile.token_of(r) * token_stride + tile.head_of(r) * head_stride, head_dim, to);
    }
}
