// Latent attention of one tile of rows over a run of keys, in float32. A key is loaded once, and is its value
// too. Keys are multiplied with queries, and not the other way round, so that one key's scores of all rows
// lie side by side and the softmax goes over rows in lanes. Included after rms_norm.inl.

// Loads the rows to [dim, kLatentRows], with zeros behind the last.
template <class T>
static void load_latent_queries(const LatentAttentionParams& p, const LatentTile& tile, float* to) {
    float row[kMaxLatentDim];
    for (int r = 0; r < kLatentRows; ++r) {
        if (r < tile.num_rows) {
            const int32_t query = (tile.first_row + r) / p.num_q_heads;
            const int32_t head = (tile.first_row + r) % p.num_q_heads;
            load_row(static_cast<const T*>(p.q) + (tile.sequence.first_q + query) * p.q_token_stride +
                         head * p.q_head_stride,
                     p.qk_dim, row);
        }
        for (int d = 0; d < p.qk_dim; ++d) to[d * kLatentRows + r] = r < tile.num_rows ? row[d] : 0.0f;
    }
}

// Loads the keys [first, first + count) of the sequence to [count, row_stride(qk_dim)].
template <class T>
static void load_latent_keys(const LatentAttentionParams& p, int32_t batch_index, int32_t first, int count,
                             float* to) {
    const IndexArray pages = p.page_table.from(batch_index * p.page_table_stride);
    auto row_of = [&](int32_t key) {
        return static_cast<const T*>(p.kv) + pages[key / p.page_size] * p.kv_page_stride +
               key % p.page_size * p.kv_slot_stride;
    };
    for (int j = 0; j < count; ++j, to += row_stride(p.qk_dim)) {
        if (j + 1 < count) prefetch_numbers(row_of(first + j + 1), p.qk_dim);
        load_row(row_of(first + j), p.qk_dim, to);
    }
}

// What the rows have seen so far, in lanes.
struct LatentState {
    float max[kLatentRows], sum[kLatentRows];
};

// Turns the dot products of `count` keys into softmax weights, and adds them to the state. `num_seen` of the
// keys, the first ones, are seen by each row. `factors` get what the output so far has to be multiplied by.
static void weigh_latent(float* weights, int count, float scale_log2, const float* num_seen,
                         LatentState& state, float* factors) {
    for (int r = 0; r < kLatentRows; r += kLanes) {
        const Vec seen = load(num_seen + r), old_max = load(state.max + r);
        Vec max = old_max;
        for (int j = 0; j < count; ++j) {
            float* const scores = weights + j * kLatentRows + r;
            const Vec score = seen > (float)j ? load(scores) * scale_log2 : broadcast(-INFINITY);
            store(scores, score);
            max = score > max ? score : max;
        }
        const Vec safe = max == -INFINITY ? Vec{} : max;
        const Vec factor = exp2(old_max - safe);  // 0 from -inf
        Vec sum = load(state.sum + r) * factor;
        for (int j = 0; j < count; ++j) {
            float* const scores = weights + j * kLatentRows + r;
            const Vec weight = exp2(load(scores) - safe);
            store(scores, weight);
            sum += weight;
        }
        store(state.max + r, max);
        store(state.sum + r, sum);
        store(factors + r, factor);
    }
}

template <class K>
static void attend_latent_keys(const LatentAttentionParams& p, const LatentTile& tile, int32_t first_key,
                               int32_t last_key, LatentScratch& scratch, Partial result) {
    const int stride = row_stride(p.v_dim), key_stride = row_stride(p.qk_dim);
    LatentState state;
    for (int r = 0; r < kLatentRows; ++r) state.max[r] = -INFINITY, state.sum[r] = 0.0f;
    for (int i = 0; i < tile.num_rows * stride; ++i) result.out[i] = 0.0f;
    const int32_t end_of_tile = tile.end_key(p, tile.num_rows - 1);  // the last row sees most
    last_key = last_key < end_of_tile ? last_key : end_of_tile;
    for (int32_t begin = first_key; begin < last_key; begin += kLatentKeys) {
        const int count = last_key - begin < kLatentKeys ? last_key - begin : kLatentKeys;
        load_latent_keys<K>(p, tile.batch_index, begin, count, scratch.keys);
        multiply({scratch.keys, key_stride, scratch.queries, kLatentRows, scratch.weights, kLatentRows, count,
                  kLatentRows, p.qk_dim, Into::replaced});
        float num_seen[kLatentRows] = {}, factors[kLatentRows];
        for (int r = 0; r < tile.num_rows; ++r) {
            const int32_t seen = tile.end_key(p, r) - begin;
            num_seen[r] = static_cast<float>(seen < 0 ? 0 : seen > count ? count : seen);
        }
        weigh_latent(scratch.weights, count, p.softmax_scale * kLog2e, num_seen, state, factors);
        for (int r = 0; r < tile.num_rows;) {
            int end = r;  // rows that see the same keys go together
            for (; end < tile.num_rows && num_seen[end] == num_seen[r]; ++end) {
                if (factors[end] != 1.0f) scale_row(result.out + end * stride, stride, factors[end]);
            }
            if (num_seen[r] > 0.0f) {  // what a row does not see is left out: it may hold NaN
                multiply_transposed({scratch.weights + r, kLatentRows, scratch.keys, key_stride,
                                     result.out + r * stride, stride, end - r, stride,
                                     static_cast<int>(num_seen[r]), Into::chained});
            }
            r = end;
        }
    }
    for (int r = 0; r < tile.num_rows; ++r) {
        const SoftmaxState done{state.max[r], state.sum[r]};
        scale_row(result.out + r * stride, stride, done.inverse_sum());
        result.lse[r] = done.lse();
    }
}

static void attend_latent(const LatentAttentionParams& p, const LatentTile& tile, int32_t first_key,
                          int32_t last_key, LatentScratch& scratch, Partial result) {
    with_type(p.dtype, [&](auto type) {
        using T = decltype(type);
        load_latent_queries<T>(p, tile, scratch.queries);
        if (p.kv_dtype == p.dtype)
            attend_latent_keys<T>(p, tile, first_key, last_key, scratch, result);
        else
            attend_latent_keys<Float8E4m3>(p, tile, first_key, last_key, scratch, result);
    });
}

static void store_latent(const LatentAttentionParams& p, const LatentTile& tile, Partial result) {
    with_type(p.dtype, [&](auto type) {
        using T = decltype(type);
        for (int r = 0; r < tile.num_rows; ++r) {
            const int64_t token = tile.sequence.first_q + (tile.first_row + r) / p.num_q_heads;
            const int64_t head = (tile.first_row + r) % p.num_q_heads;
            store_row(result.out + r * row_stride(p.v_dim), p.out_scale, p.v_dim,
                      static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride);
            if (p.lse) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = result.lse[r];
        }
    });
}

constexpr LatentKernels kLatentKernels = {attend_latent, store_latent};
