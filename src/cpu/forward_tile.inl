// Attention of one tile of rows over a run of key tiles, in float32 (FlashAttention, Dao et al. 2022). The
// dtype of the arrays only matters where rows are loaded and stored. Included after key_tile.inl.

static void scale_row(float* row, int n, float factor) {
    for (int d = 0; d < n; d += kLanes) store(row + d, load(row + d) * factor);
}

// What the codes of one tile's keys, or of its values, are multiplied by, and what is added then. The scale
// of what no row sees is 0: it is never read.
struct KeyScales {
    float scale[kTileKeys];
    float minimum[kTileKeys];  // of int4 alone
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
static float weigh_row(float* row, const ScoreTransform& transform, float slope_log2, const VisibleKeys& see,
                       int32_t q_pos, int32_t k_begin, SoftmaxState& state) {
    transform_row(row, transform);
    add_alibi(row, slope_log2, q_pos, k_begin);
    for (int j = see.prefix_end; j < see.window_begin; ++j) row[j] = -INFINITY;
    for (int j = see.window_end; j < kTileKeys; ++j) row[j] = -INFINITY;

    Vec max = load(row);
    for (int j = kLanes; j < kTileKeys; j += kLanes) {
        Vec score = load(row + j);
        max = score > max ? score : max;
    }
    float factor = state.raise(max_of_lanes(max));
    Vec sum{};
    for (int j = 0; j < kTileKeys; j += kLanes) {
        Vec weight = exp2(load(row + j) - state.safe_max());
        sum += weight;
        store(row + j, weight);
    }
    state.sum += sum_of_lanes(sum);
    return factor;
}

// Over keys and values of these types; the queries are in scratch.
template <class K, class V>
static void attend_typed(const AttentionParams& p, const RowTile& tile, int32_t first_key_tile,
                         int32_t last_key_tile, TileScratch& scratch, Partial result) {
    const int head_dim = p.head_dim, stride = row_stride(head_dim), rows = tile.num_rows;
    const Visibility& see = tile.sequence.see;
    const KeyTiles tiles = tile.key_tiles();
    float softmax_scale = p.softmax_scale;
    bool scales_keys = false, scales_values = false;
    if constexpr (kIsCode<K>) {
        softmax_scale *= static_scale<K>(p.k_scales, tile.kv_head);
        scales_keys = p.k_scales.data && !are_static<K>(p.k_scales);
        scales_values = p.v_scales.data && !are_static<V>(p.v_scales);
    }
    const ScoreTransform transform = ScoreTransform::make(softmax_scale, p.softcap);

    SoftmaxState states[kTileRows];
    float slopes_log2[kTileRows];
    int32_t q_pos[kTileRows];
    for (int r = 0; r < rows; ++r) {
        q_pos[r] = tile.q_pos_of(r);
        slopes_log2[r] = slope_log2_of(p, tile, r);
    }
    for (int i = 0; i < rows * stride; ++i) result.out[i] = 0.0f;

    KeyRows<K, V> key_rows[2];  // of tile t: key_rows[t % 2]
    if (first_key_tile < last_key_tile) {
        find_keys(p, tile, tiles, tiles.start(first_key_tile), key_rows[first_key_tile % 2]);
    }
    for (int32_t t = first_key_tile; t < last_key_tile; ++t) {
        const int32_t k_begin = tiles.start(t);
        const int32_t next_t = t + 1 < last_key_tile ? t + 1 : t;
        const KeyRows<K, V>& here = key_rows[t % 2];
        KeyRows<K, V>& next = key_rows[next_t % 2];
        if (next_t != t) find_keys(p, tile, tiles, tiles.start(next_t), next);
        const TileMask mask = TileMask::make(see, q_pos, rows, k_begin);

        load_keys(here.k, next.k, head_dim, scratch.keys);
        if constexpr (kIsCode<K>) {
            if (scales_keys) {
                KeyScales scales;
                find_scales<K>(p, tile, tiles, k_begin, p.k_scales, scales);
                scale_keys<K>(scales, head_dim, scratch.keys);
            }
        }
        multiply({scratch.queries, stride, scratch.keys, kTileKeys, scratch.weights, kTileKeys, rows,
                  kTileKeys, head_dim, Into::replaced});

        for (int r = 0; r < rows; ++r) {
            float factor = weigh_row(scratch.weights + r * kTileKeys, transform, slopes_log2[r],
                                     mask.visible_to(r), q_pos[r], k_begin, states[r]);
            if (factor != 1.0f) scale_row(result.out + r * stride, stride, factor);
            if (p.dropout.any()) {
                float* const weights = scratch.weights + r * kTileKeys;
                for_dropped(p.dropout, p.dropout.head(tile.batch_index, p.num_q_heads, tile.head_of(r)),
                            tile.token_of(r), k_begin, [=](int j) { weights[j] = 0.0f; });
            }
        }

        load_values(here.v, next.v, head_dim, scratch.values);
        if constexpr (kIsCode<V>) {
            if (scales_values) {
                KeyScales scales;
                find_scales<V>(p, tile, tiles, k_begin, p.v_scales, scales);
                scale_values<V>(scales, stride, scratch.values);
            }
        }
        add_values(mask, scratch.weights, scratch.values, stride, result.out);
    }

    for (int r = 0; r < rows; ++r) {
        scale_row(result.out + r * stride, stride, states[r].inverse_sum());
        result.lse[r] = states[r].lse();
    }
}

static void attend(const AttentionParams& p, const RowTile& tile, int32_t first_key_tile,
                   int32_t last_key_tile, TileScratch& scratch, Partial result) {
    with_type(p.dtype, [&](auto type) {
        load_tile_rows(tile, static_cast<const decltype(type)*>(p.q) + tile.sequence.q_begin,
                       p.q_token_stride, p.q_head_stride, p.head_dim, scratch.queries);
    });
    with_cache_types(p.k_dtype, p.v_dtype, [&](auto k, auto v) {
        attend_typed<decltype(k), decltype(v)>(p, tile, first_key_tile, last_key_tile, scratch, result);
    });
}

// The scale in memory of all values of a KV head; 1 if there is none.
static float v_scale_of(const AttentionParams& p, int32_t kv_head) {
    if (!is_code(p.v_dtype) || p.v_dtype == DType::int4) return 1.0f;
    return static_scale<Int8>(p.v_scales, kv_head);
}

template <class T>
static void store_typed(const AttentionParams& p, const RowTile& tile, Partial result) {
    const float v_scale = v_scale_of(p, tile.kv_head);
    for (int r = 0; r < tile.num_rows; ++r) {
        int64_t token = tile.token_of(r), head = tile.head_of(r);
        store_row(result.out + r * row_stride(p.head_dim), p.out_scale * v_scale, p.head_dim,
                  static_cast<T*>(p.out) + tile.sequence.out_begin + token * p.out_token_stride +
                      head * p.out_head_stride);
        if (p.lse) {
            p.lse[tile.sequence.lse_begin + token * p.lse_token_stride + head * p.lse_head_stride] =
                result.lse[r];
        }
    }
}

static void store(const AttentionParams& p, const RowTile& tile, Partial result) {
    with_type(p.dtype, [&](auto type) { store_typed<decltype(type)>(p, tile, result); });
}

constexpr ForwardKernels kForwardKernels = {attend, store};
