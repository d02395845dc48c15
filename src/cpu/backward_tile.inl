// The gradients of attention in float32 by recomputation (FlashAttention, Dao et al. 2022; Dao 2023). With
// scores S, weights P = exp(S - LSE), and M, which dropout multiplies them by (0 or 1 / (1 - p)):
//
//     dV = (M P)^T dO     dP = M (dO V^T)     dS = P (dP - delta)     delta = rowsum(dO O) - dLSE
//     dQ = scale dS' K    dK = scale dS'^T Q  with dS' = dS (1 - tanh^2) under a softcap, and dS without
//     dslope = sum of dS (k_pos - q_pos)
//     dsink = -sum of exp(sink - LSE) delta
//
// Included after key_tile.inl.

static int64_t first_query(const AttentionBackwardParams& p, const RowTile& tile,
                           const GradientStrides& strides) {
    const int32_t b = tile.batch_index;
    return p.cu_seqlens_q ? p.cu_seqlens_q[b] * strides.token : b * strides.batch;
}

static int64_t first_key(const AttentionBackwardParams& p, const RowTile& tile,
                         const GradientStrides& strides) {
    const int32_t b = tile.batch_index;
    return p.cu_seqlens_k ? p.cu_seqlens_k[b] * strides.token : b * strides.batch;
}

template <class T>
static float dot(const T* a, const T* b, int n) {
    Vec sum{};
    int d = 0;
    for (; d + kLanes <= n; d += kLanes) sum += load_lanes(a + d) * load_lanes(b + d);
    float rest = 0.0f;
    for (; d < n; ++d) rest += to_float(a[d]) * to_float(b[d]);
    return sum_of_lanes(sum) + rest;
}

template <class T>
static void prepare_typed(const AttentionBackwardParams& p, const RowTile& tile, RowTerms terms) {
    const T* const out = static_cast<const T*>(p.out) + tile.sequence.out_begin;
    const T* const dout = static_cast<const T*>(p.dout) + first_query(p, tile, p.dout_strides);
    const int64_t dlse_begin = first_query(p, tile, p.dlse_strides);
    for (int r = 0; r < tile.num_rows; ++r) {
        const int64_t token = tile.token_of(r), head = tile.head_of(r);
        const float lse =
            p.lse[tile.sequence.lse_begin + token * p.lse_token_stride + head * p.lse_head_stride];
        // Its dout may be anything. With a sink, it has an LSE.
        const bool is_empty =
            std::fabs(lse) == INFINITY ||
            (p.sinks && !p.block_mask.sees_any(tile.sequence.see, tile.batch_index, tile.head_of(r),
                                               tile.token_of(r), tile.q_pos_of(r)));
        float delta = 0.0f;
        if (!is_empty) {
            delta = dot(out + token * p.out_token_stride + head * p.out_head_stride,
                        dout + token * p.dout_strides.token + head * p.dout_strides.head, p.head_dim_v);
        }
        if (p.dlse) delta -= p.dlse[dlse_begin + token * p.dlse_strides.token + head * p.dlse_strides.head];
        terms.lse_log2[r] = is_empty ? INFINITY : lse * kLog2e;
        terms.delta[r] = is_empty ? 0.0f : delta;
        if (terms.dsink) terms.dsink[r] = sink_gradient(p.sinks[head], lse, delta);
    }
}

static void prepare(const AttentionBackwardParams& p, const RowTile& tile, RowTerms terms) {
    with_type(p.dtype, [&](auto type) { prepare_typed<decltype(type)>(p, tile, terms); });
}

static int32_t lesser(int32_t a, int32_t b) { return a < b ? a : b; }

static void fill(float* to, int64_t count, float value) {
    for (int64_t i = 0; i < count; ++i) to[i] = value;
}

// Queries and dout of a tile's rows. Those of empty rows count as zeros, whatever they are.
template <class T>
static void load_rows(const AttentionBackwardParams& p, const RowTile& tile, RowTerms terms,
                      BackwardScratch& scratch) {
    load_tile_rows(tile, static_cast<const T*>(p.q) + tile.sequence.q_begin, p.q_token_stride,
                   p.q_head_stride, p.head_dim, scratch.queries);
    load_tile_rows(tile, static_cast<const T*>(p.dout) + first_query(p, tile, p.dout_strides),
                   p.dout_strides.token, p.dout_strides.head, p.head_dim_v, scratch.douts);
    const int stride = row_stride(p.head_dim), v_stride = row_stride(p.head_dim_v);
    for (int r = 0; r < tile.num_rows; ++r) {
        if (terms.lse_log2[r] != INFINITY) continue;
        fill(scratch.queries + r * stride, stride, 0.0f);
        fill(scratch.douts + r * v_stride, v_stride, 0.0f);
    }
}

// One tile of a block of keys in scratch.
struct KeyTile {
    float *keys_by_dim, *values_by_dim;  // [dim, kTileKeys]
    float *keys, *dk, *dv;               // [kTileKeys, row_stride()]

    static KeyTile make(BackwardScratch& scratch, int i, const AttentionBackwardParams& p) {
        const int begin = i * kTileKeys * row_stride(p.head_dim);
        const int v_begin = i * kTileKeys * row_stride(p.head_dim_v);
        return {scratch.keys_by_dim + begin, scratch.values_by_dim + v_begin, scratch.keys + begin,
                scratch.dk + begin, scratch.dv + v_begin};
    }
};

// The keys from k_begin on that some row of `tile` sees, and their values.
template <class T>
static void load_key_tile(const AttentionBackwardParams& p, const RowTile& tile, const KeyTiles& tiles,
                          int32_t k_begin, const KeyTile& to) {
    KeyRows<T, T> rows;
    find_keys(p, tile, tiles, k_begin, rows);
    load_keys(rows.k, rows.k, p.head_dim, to.keys_by_dim);
    load_keys(rows.v, rows.v, p.head_dim_v, to.values_by_dim);
    load_values(rows.k, rows.k, p.head_dim, to.keys);
}

static void hide(float* row, const VisibleKeys& see) {
    for (int j = see.prefix_end; j < see.window_begin; ++j) row[j] = 0.0f;
    for (int j = see.window_end; j < kTileKeys; ++j) row[j] = 0.0f;
}

// The sum of dS (k_pos - q_pos) over one row of a tile, or of dS -|k_pos - q_pos|.
static float slope_gradient(const float* dscores, bool is_symmetric, int32_t q_pos, int32_t k_begin) {
    float lanes[kLanes];
    for (int l = 0; l < kLanes; ++l) lanes[l] = static_cast<float>(l);
    const Vec first = load(lanes) + static_cast<float>(k_begin - q_pos);
    Vec sum{};
    for (int j = 0; j < kTileKeys; j += kLanes) {
        const Vec way = first + static_cast<float>(j);
        const Vec back = way > 0.0f ? -way : way;
        sum += load(dscores + j) * (is_symmetric ? back : way);
    }
    return sum_of_lanes(sum);
}

// What the kernels need for one row of a tile.
struct RowGradients {
    const ScoreTransform& transform;
    Alibi alibi;
    float lse_log2, delta;
    int32_t q_pos, k_begin;
    VisibleKeys see;
    const float* kept;  // [kTileKeys]: M; null without dropout
    double* dslope;     // may be null

    // Turns dot products of a query with keys into weights, and those of dout with values into gradients of
    // scores before their scale.
    void apply(float* weights, float* dscores) const {
        transform_row(weights, transform);
        float cap_slopes[kTileKeys];
        if (transform.has_softcap) {
            for (int j = 0; j < kTileKeys; j += kLanes) {
                const Vec tanh = load(weights + j) * (1.0f / transform.outer);
                store(cap_slopes + j, 1.0f - tanh * tanh);
            }
            hide(cap_slopes, see);
        }
        alibi.add(weights, q_pos, k_begin);
        for (int j = 0; j < kTileKeys; j += kLanes) store(weights + j, exp2(load(weights + j) - lse_log2));
        hide(weights, see);
        hide(dscores, see);
        for (int j = 0; j < kTileKeys; j += kLanes) {
            const Vec weight = load(weights + j);
            Vec dweight = load(dscores + j);
            if (kept) {
                dweight *= load(kept + j);
                store(weights + j, weight * load(kept + j));
            }
            store(dscores + j, weight * (dweight - delta));
        }
        if (dslope) *dslope += slope_gradient(dscores, alibi.is_symmetric, q_pos, k_begin);
        if (transform.has_softcap) {
            for (int j = 0; j < kTileKeys; j += kLanes)
                store(dscores + j, load(dscores + j) * load(cap_slopes + j));
        }
    }
};

// Weights after dropout and gradients of scores, of the rows in scratch and a tile of keys.
static void differentiate(const AttentionBackwardParams& p, const RowTile& tile, const KeyTile& keys,
                          const TileMask& mask, RowTerms terms, BackwardScratch& scratch, double* dslopes) {
    const int stride = row_stride(p.head_dim), v_stride = row_stride(p.head_dim_v), rows = tile.num_rows;
    multiply({scratch.queries, stride, keys.keys_by_dim, kTileKeys, scratch.weights, kTileKeys, rows,
              kTileKeys, p.head_dim, Into::replaced});
    multiply({scratch.douts, v_stride, keys.values_by_dim, kTileKeys, scratch.dscores, kTileKeys, rows,
              kTileKeys, p.head_dim_v, Into::replaced});
    const ScoreTransform transform = ScoreTransform::make(p.softmax_scale, p.softcap);
    for (int r = 0; r < rows; ++r) {
        float kept[kTileKeys];
        if (p.dropout.any()) {
            fill(kept, kTileKeys, p.out_scale);
            for_dropped(p.dropout, p.dropout.head(tile.batch_index, p.num_q_heads, tile.head_of(r)),
                        tile.token_of(r), mask.k_begin, [&](int j) { kept[j] = 0.0f; });
        }
        const RowGradients row{transform,
                               Alibi::make(p, tile, r),
                               terms.lse_log2[r],
                               terms.delta[r],
                               mask.q_pos[r],
                               mask.k_begin,
                               mask.visible_to(r),
                               p.dropout.any() ? kept : nullptr,
                               dslopes ? dslopes + (tile.first_row + r) % tile.group_size : nullptr};
        row.apply(scratch.weights + r * kTileKeys, scratch.dscores + r * kTileKeys);
    }
}

// Positions of a tile's rows.
struct RowPositions {
    int32_t q_pos[kTileRows];

    explicit RowPositions(const RowTile& tile) {
        for (int r = 0; r < tile.num_rows; ++r) q_pos[r] = tile.q_pos_of(r);
    }
};

template <class T>
static void store_key_gradients(const AttentionBackwardParams& p, const RowTile& rows, int32_t k_begin,
                                int32_t num_keys, const BackwardScratch& scratch) {
    auto store_rows = [&](const float* from, int head_dim, float scale, void* to,
                          const GradientStrides& strides) {
        T* row = static_cast<T*>(to) + first_key(p, rows, strides) + k_begin * strides.token +
                 rows.kv_head * strides.head;
        for (int32_t j = 0; j < num_keys; ++j, from += row_stride(head_dim), row += strides.token)
            store_row(from, scale, head_dim, row);
    };
    store_rows(scratch.dk, p.head_dim, p.softmax_scale, p.dk, p.dk_strides);
    store_rows(scratch.dv, p.head_dim_v, 1.0f, p.dv, p.dv_strides);
}

template <class T>
static void key_gradients_typed(const AttentionBackwardParams& p, const RowTile& all_rows, int32_t k_begin,
                                RowTerms terms, BackwardScratch& scratch, float* dq, double* dslopes) {
    const int stride = row_stride(p.head_dim), v_stride = row_stride(p.head_dim_v);
    const int group_size = all_rows.group_size;
    const RangedSlice& sequence = all_rows.sequence;
    const int32_t num_keys = lesser(tiles_per_block(p) * kTileKeys, sequence.see.seqlen_k - k_begin);
    const int num_tiles = (num_keys + kTileKeys - 1) / kTileKeys;
    fill(scratch.dk, num_keys * stride, 0.0f);
    fill(scratch.dv, num_keys * v_stride, 0.0f);

    int32_t first_rows[kMaxBlockTiles], end_rows[kMaxBlockTiles];  // those that see a tile, or some more
    int32_t first_row = all_rows.num_rows, end_row = 0;
    for (int i = 0; i < num_tiles; ++i) {
        const int32_t begin = k_begin + i * kTileKeys;
        const QueryRange range(sequence.see, sequence.seqlen_q, begin,
                               lesser(begin + kTileKeys, sequence.see.seqlen_k));
        first_rows[i] = range.begin * group_size;
        end_rows[i] = range.end * group_size;
        if (first_rows[i] >= end_rows[i]) continue;
        first_row = lesser(first_row, first_rows[i]);
        end_row = end_row > end_rows[i] ? end_row : end_rows[i];
        load_key_tile<T>(p, all_rows, all_rows.key_tiles(), begin, KeyTile::make(scratch, i, p));
    }
    RowTile tile = all_rows;
    for (int32_t row = first_row / kTileRows * kTileRows; row < end_row; row += kTileRows) {
        tile.first_row = row;
        tile.num_rows = lesser(kTileRows, all_rows.num_rows - row);
        const RowPositions positions(tile);
        load_rows<T>(p, tile, terms.from(row), scratch);
        for (int i = 0; i < num_tiles; ++i) {
            if (row >= end_rows[i] || row + tile.num_rows <= first_rows[i]) continue;
            const KeyTile keys = KeyTile::make(scratch, i, p);
            if (!keeps_some_block(p, tile, k_begin + i * kTileKeys)) continue;
            const TileMask mask = TileMask::make(p, tile, positions.q_pos, k_begin + i * kTileKeys);
            differentiate(p, tile, keys, mask, terms.from(row), scratch, dslopes);
            const int its_keys = lesser(kTileKeys, num_keys - i * kTileKeys);
            multiply_transposed({scratch.weights, kTileKeys, scratch.douts, v_stride, keys.dv, v_stride,
                                 its_keys, v_stride, tile.num_rows, Into::added});
            multiply_transposed({scratch.dscores, kTileKeys, scratch.queries, stride, keys.dk, stride,
                                 its_keys, stride, tile.num_rows, Into::added});
            if (dq) add_values(mask, scratch.dscores, keys.keys, stride, dq + int64_t{row} * stride);
        }
    }
    store_key_gradients<T>(p, all_rows, k_begin, num_keys, scratch);
}

static void key_gradients(const AttentionBackwardParams& p, const RowTile& all_rows, int32_t k_begin,
                          RowTerms terms, BackwardScratch& scratch, float* dq, double* dslopes) {
    with_type(p.dtype, [&](auto type) {
        key_gradients_typed<decltype(type)>(p, all_rows, k_begin, terms, scratch, dq, dslopes);
    });
}

template <class T>
static void query_gradients_typed(const AttentionBackwardParams& p, const RowTile& tile, RowTerms terms,
                                  BackwardScratch& scratch, float* dq) {
    const int stride = row_stride(p.head_dim);
    fill(dq, tile.num_rows * stride, 0.0f);
    load_rows<T>(p, tile, terms, scratch);
    const RowPositions positions(tile);
    const KeyTiles tiles = tile.key_tiles();
    const KeyTile keys = KeyTile::make(scratch, 0, p);
    for (int32_t t = 0; t < tiles.count; ++t) {
        const int32_t k_begin = tiles.start(t);
        if (!keeps_some_block(p, tile, k_begin)) continue;
        load_key_tile<T>(p, tile, tiles, k_begin, keys);
        const TileMask mask = TileMask::make(p, tile, positions.q_pos, k_begin);
        differentiate(p, tile, keys, mask, terms, scratch, nullptr);
        add_values(mask, scratch.dscores, keys.keys, stride, dq);
    }
}

static void query_gradients(const AttentionBackwardParams& p, const RowTile& tile, RowTerms terms,
                            BackwardScratch& scratch, float* dq) {
    with_type(p.dtype,
              [&](auto type) { query_gradients_typed<decltype(type)>(p, tile, terms, scratch, dq); });
}

static void store_query_gradients(const AttentionBackwardParams& p, const RowTile& tile, const float* dq) {
    with_type(p.dtype, [&](auto type) {
        auto* const first = static_cast<decltype(type)*>(p.dq) + first_query(p, tile, p.dq_strides);
        for (int32_t r = 0; r < tile.num_rows; ++r) {
            store_row(dq + int64_t{r} * row_stride(p.head_dim), p.softmax_scale, p.head_dim,
                      first + tile.token_of(r) * p.dq_strides.token + tile.head_of(r) * p.dq_strides.head);
        }
    });
}

constexpr BackwardKernels kBackwardKernels = {prepare, key_gradients, query_gradients, store_query_gradients};
