// Attention of one tile of rows over a run of key tiles, in float32 (FlashAttention, Dao et al. 2022). The
// dtype of the arrays only matters where rows are loaded and stored. Included after key_tile.inl, panel.inl,
// streamed_rows.inl and kMaxStreamedRows, the rows of a KV head that read keys and values in place.

static void scale_row(float* row, int n, float factor) {
    for (int d = 0; d < n; d += kLanes) store(row + d, load(row + d) * factor);
}

// What the codes of one tile's keys, or of its values, are multiplied by, and what is added then. A scale
// that no row needs is not read, and counts as 0.
struct KeyScales {
    float scale[kTileKeys];
    float minimum[kTileKeys];  // used for int4 alone
};

template <class Code>
static void find_scales(const AttentionParams& p, const RowTile& tile, const KeyTiles& tiles, int32_t k_begin,
                        const CacheScales& scales, KeyScales& found) {
    const auto* words = static_cast<const uint32_t*>(scales.data) + tile.kv_head * scales.head_stride;
    const VisibleKeys needed =
        VisibleKeys::make(k_begin, tiles.prefix_end, tiles.window_begin, tiles.window_end);
    for (int j = 0; j < kTileKeys; ++j) found.scale[j] = found.minimum[j] = 0.0f;
    for_pages(p, tile, needed, k_begin, [&](int j, int end, int64_t page, int32_t slot) {
        const uint32_t* word = words + page * scales.page_stride + slot * scales.token_stride;
        for (; j < end; ++j, word += scales.token_stride) {
            if constexpr (kNumbersOf<Code> == 2) {
                found.scale[j] = scale_of_int4_word(*word);
                found.minimum[j] = minimum_of_int4_word(*word);
            } else {
                found.scale[j] = float_of_bits(*word);
            }
        }
    });
}

// keys [head_dim, kTileKeys]
template <class Code>
static void scale_keys(const KeyScales& scales, int head_dim, float* keys) {
    for (int j = 0; j < kTileKeys; j += kLanes) {
        const Vec scale = load(scales.scale + j), minimum = load(scales.minimum + j);
        for (int d = 0; d < head_dim; ++d) {
            float* const key = keys + d * kTileKeys + j;
            store(key, kNumbersOf<Code> == 2 ? load(key) * scale + minimum : load(key) * scale);
        }
    }
}

// values [kTileKeys, stride]
template <class Code>
static void scale_values(const KeyScales& scales, int stride, float* values) {
    for (int j = 0; j < kTileKeys; ++j, values += stride) {
        const Vec scale = broadcast(scales.scale[j]), minimum = broadcast(scales.minimum[j]);
        for (int d = 0; d < stride; d += kLanes) {
            const Vec scaled = load(values + d) * scale;
            store(values + d, kNumbersOf<Code> == 2 ? scaled + minimum : scaled);
        }
    }
}

// Whether the scales of these codes are the same for all tokens, so that they belong to sums.
template <class Code>
static bool are_static(const CacheScales& scales) {
    return kNumbersOf<Code> == 1 && scales.data && scales.page_stride == 0 && scales.token_stride == 0;
}

// The scale of codes for all tokens of a KV head, beside the host's; 1 if there is none.
template <class Code>
static float static_scale(const CacheScales& scales, int32_t kv_head) {
    if (!are_static<Code>(scales)) return 1.0f;
    return static_cast<const float*>(scales.data)[kv_head * scales.head_stride];
}

// Turns one row of dot products into softmax weights, and adds them to the state. Returns what the output
// so far has to be multiplied by.
static float weigh_row(float* row, const ScoreTransform& transform, Alibi alibi, const TileMask& mask,
                       int32_t r, const UnifiedMax* unified, SoftmaxState& state) {
    transform_row(row, transform);
    alibi.add(row, mask.q_pos[r], mask.k_begin, mask.tile.chosen);
    const VisibleKeys see = mask.visible_to(r);
    for (int j = see.prefix_end; j < see.window_begin; ++j) row[j] = -INFINITY;
    for (int j = see.window_end; j < kTileKeys; ++j) row[j] = -INFINITY;
    if (const uint64_t hidden = mask.hidden_from(r)) {
        for (int j = 0; j < kTileKeys; ++j)
            if (hidden >> j & 1) row[j] = -INFINITY;
    }

    Vec max = load(row);
    for (int j = kLanes; j < kTileKeys; j += kLanes) {
        Vec score = load(row + j);
        max = score > max ? score : max;
    }
    const float row_max = max_of_lanes(max);
    const float factor = state.raise(unified ? (*unified)(row_max) : row_max);
    Vec sum{};
    for (int j = 0; j < kTileKeys; j += kLanes) {
        Vec weight = exp2(load(row + j) - state.safe_max());
        sum += weight;
        store(row + j, weight);
    }
    state.sum += sum_of_lanes(sum);
    return factor;
}

// Attention over keys and values of these types. A tile of keys is done for all heads before the next one:
// their rows lie side by side, and memory is fast along them.
template <class K, class V>
class TileAttention {
  public:
    // The queries are in scratch.
    TileAttention(const AttentionParams& p, const HeadRun& heads, TileScratch& scratch, Partial result)
        : p_(p), heads_(heads), scratch_(scratch), result_(result) {
        for (int r = 0; r < heads.tile.num_rows; ++r) q_pos_[r] = heads.tile.q_pos_of(r);
        if (is_tree_) {
            const int64_t first_token = p.first_token(heads.tile.batch_index);
            for (int r = 0; r < heads.tile.num_rows; ++r)
                tree_words_[r] = p.tree_word(first_token + heads.tile.token_of(r));
        }
        for (int i = 0; i < heads.num_rows() * v_stride_; ++i) result.out[i] = 0.0f;
        if constexpr (kIsCode<K>) {
            scales_keys_ = p.k_scales.data && !are_static<K>(p.k_scales);
            scales_values_ = p.v_scales.data && !are_static<V>(p.v_scales);
        } else if (is_streamed_) {
            for (int r = 0; r < heads.num_rows(); ++r) {
                float* const query = scratch.queries + r * stride_;
                if constexpr (std::is_same_v<X, float>)
                    arrange(static_cast<const K*>(nullptr), query, stride_);
                else
                    store_row(query, 1.0f, stride_, reinterpret_cast<X*>(query));  // as it was
            }
        }
    }

    void run(int32_t first_key_tile, int32_t last_key_tile) {
        const auto next_kept = [&](int32_t t) {
            while (t < last_key_tile && !keeps_some_block(tiles_.start(t))) ++t;
            return t;
        };
        for (int32_t t = next_kept(first_key_tile), next; t < last_key_tile; t = next) {
            next = next_kept(t + 1);
            const int32_t ahead = next < last_key_tile ? next : t;
            if (is_streamed_)
                stream(tiles_.start(t), tiles_.start(ahead));
            else
                for (int32_t h = 0; h < heads_.count; ++h) attend(h, tiles_.start(t), tiles_.start(ahead));
        }
        for (int r = 0; r < heads_.num_rows(); ++r) {
            float* const out = result_.out + r * v_stride_;
            if constexpr (!kIsCode<V>) {
                if (is_streamed_) restore(static_cast<const V*>(nullptr), out, v_stride_);
            }
            scale_row(out, v_stride_, states_[r].inverse_sum());
            result_.lse[r] = states_[r].lse();
        }
    }

  private:
    using X = XOf<K, K>;  // of the queries, where rows are read in place

    TileMask mask_of(const RowTile& tile, int32_t k_begin) const {
        return TileMask::make(p_, tile, q_pos_, k_begin, is_tree_ ? tree_words_ : nullptr);
    }

    // Whether some row of some head looks at a tile of keys.
    bool keeps_some_block(int32_t k_begin) const {
        for (int32_t h = 0; h < heads_.count; ++h) {
            if (cpu::keeps_some_block(p_, heads_.tile_of(h), k_begin)) return true;
        }
        return false;
    }

    // Works on one head and one tile of keys.
    void attend(int32_t head, int32_t k_begin, int32_t next_k_begin) {
        const RowTile tile = heads_.tile_of(head);
        const int32_t first_row = head * tile.num_rows;
        const float* const queries = scratch_.queries + first_row * stride_;
        float* const out = result_.out + first_row * v_stride_;
        KeyRows<K, V> here, next;
        find_keys(p_, tile, tiles_, k_begin, here);
        find_keys(p_, tile, tiles_, next_k_begin, next);
        const TileMask mask = mask_of(tile, k_begin);

        load_keys(here.k, next.k, p_.head_dim, scratch_.keys);
        if constexpr (kIsCode<K>) {
            if (scales_keys_) {
                KeyScales scales;
                find_scales<K>(p_, tile, tiles_, k_begin, p_.k_scales, scales);
                scale_keys<K>(scales, p_.head_dim, scratch_.keys);
            }
        }
        multiply({queries, stride_, scratch_.keys, kTileKeys, scratch_.weights, kTileKeys, tile.num_rows,
                  kTileKeys, p_.head_dim, Into::replaced});
        weigh(head, mask, scratch_.weights);
        load_values(here.v, next.v, p_.head_dim_v, scratch_.values);
        if constexpr (kIsCode<V>) {
            if (scales_values_) {
                KeyScales scales;
                find_scales<V>(p_, tile, tiles_, k_begin, p_.v_scales, scales);
                scale_values<V>(scales, v_stride_, scratch_.values);
            }
        }
        add_values(mask, scratch_.weights, scratch_.values, v_stride_, out);
    }

    // Works on all heads and one tile of keys.
    void stream(int32_t k_begin, int32_t next_k_begin) {
        if constexpr (!kIsCode<K>) {
            const RowTile& tile = heads_.tile;
            const TileMask of_first = mask_of(tile, k_begin);
            const auto with_mask = [&](int32_t head, const auto& body) {  // block_mask may tell heads apart
                if (head > 0 && p_.block_mask)
                    body(mask_of(heads_.tile_of(head), k_begin));
                else
                    body(of_first);
            };
            const auto rows = StreamedRows<K>::make(p_, tile, tiles_, k_begin, next_k_begin);
            multiply_keys(rows);
            bool is_whole = true;  // whether all rows of all heads see all of the tile
            for (int32_t h = 0; h < heads_.count; ++h) {
                float* const weights = weights_of(h);
                with_mask(h, [&](const TileMask& mask) {
                    for (int r = 0; r < tile.num_rows; ++r) from_streams(weights + r * kTileKeys);
                    weigh(h, mask, weights);
                    for (int r = 0; r < tile.num_rows; ++r) to_streams(weights + r * kTileKeys);
                    is_whole = is_whole && mask.all_visible && !mask.has_hidden;
                });
            }
            if (is_whole) return add_whole(rows);
            for (int32_t h = 0; h < heads_.count; ++h) {
                with_mask(h, [&](const TileMask& mask) {
                    add_seen(mask, rows.v, h * p_.v_head_stride, weights_of(h), v_stride_,
                             result_.out + h * tile.num_rows * v_stride_);
                });
            }
        }
    }

    // The weights of a head's rows: [num_rows, kTileKeys].
    float* weights_of(int32_t head) const {
        return scratch_.weights + head * heads_.tile.num_rows * kTileKeys;
    }

    // Multiplies the queries of all heads with the keys of a tile.
    void multiply_keys(const StreamedRows<K>& rows) {
        const int num_rows = heads_.tile.num_rows;
        for (int j = 0; j < kTileKeys; j += kStreams) {
            RowAhead next(rows_ahead<K>(p_.head_dim, heads_.count), heads_.count);
            for (int32_t h = 0; h < heads_.count; ++h, next.advance()) {
                Panel<K> panel;
                for (int i = 0; i < kStreams; ++i) {
                    panel.rows[i] = rows.k[j + i] + h * p_.k_head_stride;
                    panel.next[i] = rows.k[j + i + next.place * kStreams] + next.head * p_.k_head_stride;
                }
                constexpr int kOfFloat = sizeof(float) / sizeof(X);
                multiply_panel(panel, stride_, num_rows,
                               reinterpret_cast<const X*>(scratch_.queries + h * num_rows * stride_),
                               kOfFloat * stride_, {scratch_.keys, weights_of(h) + j, kTileKeys, true, true});
            }
        }
    }

    // Adds the values of a tile that all rows of all heads see whole.
    void add_whole(const StreamedRows<V>& rows) {
        const int num_rows = heads_.tile.num_rows;
        for (int j = 0; j < kTileKeys; j += kStreams) {
            RowAhead next(rows_ahead<V>(p_.head_dim_v, heads_.count), heads_.count);
            for (int32_t h = 0; h < heads_.count; ++h, next.advance()) {
                StreamedValues<V> values;
                for (int i = 0; i < kStreams; ++i) {
                    values.rows[i] = rows.v[j + i] + h * p_.v_head_stride;
                    values.next[i] = rows.v[j + i + next.place * kStreams] + next.head * p_.v_head_stride;
                }
                add_streamed(num_rows, values, weights_of(h) + j, result_.out + h * num_rows * v_stride_,
                             v_stride_);
            }
        }
    }

    // Turns dot products of one head into softmax weights; the output so far follows the maximum of each row.
    void weigh(int32_t head, const TileMask& mask, float* weights) {
        const RowTile tile = heads_.tile_of(head);
        float softmax_scale = p_.softmax_scale;
        if constexpr (kIsCode<K>) softmax_scale *= static_scale<K>(p_.k_scales, tile.kv_head);
        const ScoreTransform transform = ScoreTransform::make(softmax_scale, p_.softcap);
        for (int r = 0; r < tile.num_rows; ++r, weights += kTileKeys) {
            const int row = head * tile.num_rows + r;
            const UnifiedMax unified = UnifiedMax::of_wide(p_.softmax_phi_of(tile.head_of(r)));
            const float factor = weigh_row(weights, transform, Alibi::make(p_, tile, r), mask, r,
                                           p_.has_softmax_phi ? &unified : nullptr, states_[row]);
            if (factor != 1.0f) scale_row(result_.out + row * v_stride_, v_stride_, factor);
            if (p_.dropout.any()) {
                for_dropped(p_.dropout, p_.dropout.head(tile.batch_index, p_.num_q_heads, tile.head_of(r)),
                            tile.token_of(r), mask.k_begin, [=](int j) { weights[j] = 0.0f; });
            }
        }
    }

    const AttentionParams& p_;
    const HeadRun& heads_;
    TileScratch& scratch_;
    const Partial result_;
    const int stride_ = row_stride(p_.head_dim), v_stride_ = row_stride(p_.head_dim_v);
    const KeyTiles tiles_ = heads_.tile.key_tiles();
    const bool is_streamed_ = !kIsCode<K> && heads_.tile.num_rows <= kMaxStreamedRows &&
                              p_.head_dim % kStepNumbers<K> == 0 && p_.head_dim_v % kStepNumbers<K> == 0;
    bool scales_keys_ = false, scales_values_ = false;
    SoftmaxState states_[kTileRows];  // of all heads
    int32_t q_pos_[kTileRows];        // of one head
    const bool is_tree_ = p_.is_tree(heads_.tile.sequence.seqlen_q);
    uint64_t tree_words_[kTileRows];  // of one head, if it is
};

static void attend(const AttentionParams& p, const HeadRun& heads, int32_t first_key_tile,
                   int32_t last_key_tile, TileScratch& scratch, Partial result) {
    with_type(p.dtype, [&](auto type) {
        for (int32_t h = 0; h < heads.count; ++h) {
            load_tile_rows(heads.tile_of(h),
                           static_cast<const decltype(type)*>(p.q) + heads.tile.sequence.q_begin,
                           p.q_token_stride, p.q_head_stride, p.head_dim,
                           scratch.queries + h * heads.tile.num_rows * row_stride(p.head_dim));
        }
    });
    with_cache_types(p.k_dtype, p.v_dtype, [&](auto k, auto v) {
        TileAttention<decltype(k), decltype(v)>(p, heads, scratch, result).run(first_key_tile, last_key_tile);
    });
}

// The scale in memory of all values of a KV head; 1 if there is none.
static float v_scale_of(const AttentionParams& p, int32_t kv_head) {
    if (!is_code(p.v_dtype) || p.v_dtype == DType::int4) return 1.0f;
    return static_scale<Int8>(p.v_scales, kv_head);
}

template <class T>
static void store_typed(const AttentionParams& p, const HeadRun& heads, Partial result) {
    const float* from = result.out;
    const float* lse = result.lse;
    for (int32_t h = 0; h < heads.count; ++h) {
        const RowTile tile = heads.tile_of(h);
        const float scale = p.out_scale * v_scale_of(p, tile.kv_head);
        for (int r = 0; r < tile.num_rows; ++r, from += row_stride(p.head_dim_v), ++lse) {
            int64_t token = tile.token_of(r), head = tile.head_of(r);
            MergeWeights weights{1.0f, 0.0f, *lse};
            if (p.sinks) weights = MergeWeights::make(*lse, p.sinks[head]);
            store_row(from, weights.a * scale, p.head_dim_v,
                      static_cast<T*>(p.out) + tile.sequence.out_begin + token * p.out_token_stride +
                          head * p.out_head_stride);
            if (p.lse) {
                p.lse[tile.sequence.lse_begin + token * p.lse_token_stride + head * p.lse_head_stride] =
                    weights.lse;
            }
        }
    }
}

static void store(const AttentionParams& p, const HeadRun& heads, Partial result) {
    with_type(p.dtype, [&](auto type) { store_typed<decltype(type)>(p, heads, result); });
}

constexpr ForwardKernels kForwardKernels = {attend, store};
