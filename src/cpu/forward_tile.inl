// Attention of one tile of rows over a run of key tiles, in float32 (FlashAttention, Dao et al. 2022). The
// dtype of the arrays only matters where rows are loaded and stored. Included inside the namespace of one
// instruction set, after gemm.inl and its own
//     BitsVec widen(HalfVec), Vec float_of_half(HalfVec), HalfVec half_of_float(Vec).

OCTAVO_SIMD Vec load_lanes(const float* from) { return load(from); }
OCTAVO_SIMD Vec load_lanes(const Float16* from) { return float_of_half(load_as<HalfVec>(from)); }
OCTAVO_SIMD Vec load_lanes(const BFloat16* from) { return (Vec)(widen(load_as<HalfVec>(from)) << 16); }

// float8_to_float of the codes of one format, a byte each in lanes of 32 bits. No lane is ever a subnormal
// float32, with which x86 computes slowly.
template <class Format>
OCTAVO_SIMD Vec float_of_float8(BitsVec codes) {
    const BitsVec sign = (codes & 0x80u) << 24, size = codes & 0x7fu;
    const BitsVec normal = (size << Format::kShift) + ((127u - Format::kBias) << 23);
    const Vec subnormal = (Vec)(size + Format::kGridBits) - float_of_bits(Format::kGridBits);
    const BitsVec finite = size < Format::kSmallestNormal ? (BitsVec)subnormal : normal;
    constexpr bool kHasInfinity = Format::kMaxCode + 1 < Format::kNan;
    const BitsVec infinity = BitsVec{} + (kHasInfinity ? 0x7f800000u : 0x7fc00000u);
    const BitsVec special = size == Format::kMaxCode + 1 ? infinity : BitsVec{} + 0x7fc00000u;
    return (Vec)((size > Format::kMaxCode ? special : finite) | sign);
}

OCTAVO_SIMD Vec load_lanes(const Int8* from) { return __builtin_convertvector(load_as<ByteVec>(from), Vec); }
template <class Float8>
OCTAVO_SIMD Vec load_lanes(const Float8* from) {
    return float_of_float8<typename Float8::Format>(
        __builtin_convertvector(load_as<UnsignedByteVec>(from), BitsVec));
}

OCTAVO_SIMD void store_lanes(float* to, Vec x) { store(to, x); }
OCTAVO_SIMD void store_lanes(Float16* to, Vec x) { store(to, half_of_float(x)); }
OCTAVO_SIMD void store_lanes(BFloat16* to, Vec x) {
    BitsVec bits = (BitsVec)x;
    BitsVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    store(to, __builtin_convertvector(x == x ? rounded : (bits >> 16) | 0x40u, HalfVec));
}

template <class T>
static void load_row(const T* from, int n, float* to) {
    int d = 0;
    for (; d + kLanes <= n; d += kLanes) store(to + d, load_lanes(from + d));
    for (; d < n; ++d) to[d] = to_float(from[d]);
}

template <int begin>
struct Interleave {  // of lanes from `begin` on
    static constexpr int lane(int l) { return (l & 1 ? kLanes : 0) + begin + l / 2; }
};

static void load_row(const Int4Pair* from, int n, float* to) {
    int d = 0;
    for (; d + 2 * kLanes <= n; d += 2 * kLanes) {
        const BitsVec pairs = __builtin_convertvector(load_as<UnsignedByteVec>(from + d / 2), BitsVec);
        const Vec even = __builtin_convertvector((IntVec)(pairs & 0xfu), Vec);
        const Vec odd = __builtin_convertvector((IntVec)(pairs >> 4), Vec);
        store(to + d, shuffle<Interleave<0>>(even, odd));
        store(to + d + kLanes, shuffle<Interleave<kLanes / 2>>(even, odd));
    }
    for (; d < n; ++d) to[d] = static_cast<float>(from[d / 2].pair >> (d & 1 ? 4 : 0) & 0xf);
}

template <class T>
static void store_row(const float* from, float scale, int n, T* to) {
    int d = 0;
    for (; d + kLanes <= n; d += kLanes) store_lanes(to + d, load(from + d) * scale);
    for (; d < n; ++d) from_float(from[d] * scale, to[d]);
}

static void scale_row(float* row, int n, float factor) {
    for (int d = 0; d < n; d += kLanes) store(row + d, load(row + d) * factor);
}

// The keys of a tile that a query, or some query of a run, sees, counted from the tile's first:
// [0, prefix_end) and [window_begin, window_end).
struct VisibleKeys {
    int prefix_end, window_begin, window_end;

    static VisibleKeys all() { return {0, 0, kTileKeys}; }

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
    const int32_t* pages = p.paged() ? p.page_table + tile.batch_index * p.page_table_stride : nullptr;
    const int32_t page_size = p.paged() ? p.page_size : INT32_MAX;
    needed.for_ranges([&](int begin, int end) {
        for (int j = begin; j < end;) {
            const int32_t slot = (k_begin + j) % page_size;
            const int64_t page = pages ? pages[(k_begin + j) / page_size] : 0;
            const int page_end = end - j < page_size - slot ? end : j + page_size - slot;
            body(j, page_end, page, slot);
            j = page_end;
        }
    });
}

// Where the keys of one tile lie, and their values. What no row sees is a row of zeros: it is never read.
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

// Asks the memory for a row of the next tile. The hardware does not foresee it: pages lie anywhere.
template <class T>
static void prefetch_row(const T* row, int head_dim) {
    const int length = head_dim / kNumbersOf<T>;
    for (int d = 0; d < length; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

// One word of each of kLanes keys holds one dim of float32, two of a 16-bit type, four codes of 8 bits or
// eight of 4: each to its own row.
OCTAVO_SIMD void store_dims(const float*, Vec words, float* to) { store(to, words); }
OCTAVO_SIMD void store_dims(const BFloat16*, Vec words, float* to) {
    store(to, (Vec)((BitsVec)words << 16));
    store(to + kTileKeys, (Vec)((BitsVec)words & 0xffff0000u));
}
OCTAVO_SIMD void store_dims(const Float16*, Vec words, float* to) {
    store(to, float_of_half(__builtin_convertvector((BitsVec)words & 0xffffu, HalfVec)));
    store(to + kTileKeys, float_of_half(__builtin_convertvector((BitsVec)words >> 16, HalfVec)));
}

OCTAVO_SIMD void store_dims(const Int8*, Vec words, float* to) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        store(to + i * kTileKeys,
              __builtin_convertvector((IntVec)((BitsVec)words << (24 - 8 * i)) >> 24, Vec));
}
template <class Float8>
OCTAVO_SIMD void store_dims(const Float8*, Vec words, float* to) {
    using Format = typename Float8::Format;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        store(to + i * kTileKeys, float_of_float8<Format>((BitsVec)words >> (8 * i) & 0xffu));
}

OCTAVO_SIMD void store_dims(const Int4Pair*, Vec words, float* to) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        store(to + i * kTileKeys, __builtin_convertvector((IntVec)((BitsVec)words >> (4 * i) & 0xfu), Vec));
}

// to [head_dim, kTileKeys], transposed word by word
template <class T>
static void load_keys(const T* const* keys, const T* const* next_keys, int head_dim, float* to) {
    constexpr int kWordElements = sizeof(float) / sizeof(T), kWordDims = kWordElements * kNumbersOf<T>;
    const int num_words = head_dim / kWordDims;
    for (int j = 0; j < kTileKeys; j += kLanes) {
        for (int i = 0; i < kLanes; ++i) prefetch_row(next_keys[j + i], head_dim);
        for (int word = 0; word < num_words; word += kLanes) {
            Vec block[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                const T* from = keys[j + i] + word * kWordElements;
                block[i] =
                    word + kLanes <= num_words ? load_as<Vec>(from) : load_first(from, num_words - word);
            }
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                store_dims(keys[0], block[i], to + (word + i) * kWordDims * kTileKeys + j);
            }
        }
    }
}

// to [kTileKeys, row_stride(head_dim)]
template <class T>
static void load_values(const T* const* values, const T* const* next_values, int head_dim, float* to) {
    for (int j = 0; j < kTileKeys; ++j, to += row_stride(head_dim)) {
        prefetch_row(next_values[j], head_dim);
        load_row(values[j], head_dim, to);
    }
}

OCTAVO_SIMD Vec transform_score(const ScoreTransform& t, Vec qk) {
    return t.has_softcap ? t.outer * tanh(qk * t.inner) : qk * t.inner;
}

// Turns one row of dot products into softmax weights, and adds them to the state. Returns what the output
// so far has to be multiplied by.
static float weigh_row(float* row, const ScoreTransform& transform, float slope_log2, const VisibleKeys& see,
                       int32_t q_pos, int32_t k_begin, SoftmaxState& state) {
    for (int j = 0; j < kTileKeys; j += kLanes) store(row + j, transform_score(transform, load(row + j)));
    if (slope_log2 != 0.0f) {
        for (int j = 0; j < kTileKeys; ++j) row[j] += alibi_bias(slope_log2, q_pos, k_begin + j);
    }
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

// Zeroes the weights that dropout leaves out.
static void drop_weights(const Dropout& dropout, uint64_t head, int32_t query, int32_t k_begin, float* row) {
    static_assert(kTileKeys % 32 == 0);
    for (int32_t n = 0; n < kTileKeys / 32; ++n) {
        for (int32_t pair = 0; pair < 4; ++pair) {
            const Philox random = dropout.bits(head, query, k_begin / 32 + n, pair);
            for (int w = 0; w < 4; ++w) {
                float* weights = row + 32 * n + 8 * w + 2 * pair;
                if (dropout.drops_even(random.words[w])) weights[0] = 0.0f;
                if (dropout.drops_odd(random.words[w])) weights[1] = 0.0f;
            }
        }
    }
}

// out += weights * values. What a row does not see is left out, not multiplied by zero: it may hold NaN.
static void add_values(const Gemm& all, const VisibleKeys& see) {
    see.for_ranges([&](int begin, int end) {
        Gemm part = all;
        part.a += begin;
        part.b += begin * all.b_stride;
        part.depth = end - begin;
        multiply(part);
    });
}

// to [num_rows, row_stride(head_dim)]
template <class T>
static void load_queries(const AttentionParams& p, const RowTile& tile, float* to) {
    for (int r = 0; r < tile.num_rows; ++r, to += row_stride(p.head_dim)) {
        const T* q = static_cast<const T*>(p.q) + tile.sequence.q_begin +
                     tile.token_of(r) * p.q_token_stride + tile.head_of(r) * p.q_head_stride;
        load_row(q, p.head_dim, to);
    }
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
    float slopes_log2[kTileRows] = {};
    int32_t q_pos[kTileRows];
    for (int r = 0; r < rows; ++r) {
        q_pos[r] = tile.q_pos_of(r);
        if (p.alibi_slopes) {
            slopes_log2[r] =
                p.alibi_slopes[tile.batch_index * p.alibi_batch_stride + tile.head_of(r)] * kLog2e;
        }
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
        const bool all_visible = KeyTiles::all_visible(see, q_pos[0], q_pos[rows - 1], k_begin, kTileKeys);
        auto visible_to = [&](int r) {
            return all_visible ? VisibleKeys::all()
                               : VisibleKeys::make(k_begin, see.prefix_len, see.window_begin(q_pos[r]),
                                                   see.window_end(q_pos[r]));
        };

        load_keys(here.k, next.k, head_dim, scratch.keys);
        if constexpr (kIsCode<K>) {
            if (scales_keys) {
                KeyScales scales;
                find_scales<K>(p, tile, tiles, k_begin, p.k_scales, scales);
                scale_keys<K>(scales, head_dim, scratch.keys);
            }
        }
        multiply({scratch.queries, stride, scratch.keys, kTileKeys, scratch.weights, kTileKeys, rows,
                  kTileKeys, head_dim, false});

        for (int r = 0; r < rows; ++r) {
            float factor = weigh_row(scratch.weights + r * kTileKeys, transform, slopes_log2[r],
                                     visible_to(r), q_pos[r], k_begin, states[r]);
            if (factor != 1.0f) scale_row(result.out + r * stride, stride, factor);
            if (p.dropout.any()) {
                drop_weights(p.dropout, p.dropout.head(tile.batch_index, p.num_q_heads, tile.head_of(r)),
                             tile.token_of(r), k_begin, scratch.weights + r * kTileKeys);
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
        for (int r = 0; r < rows;) {
            int end = r + 1;  // rows that see the same keys go together: all, or those of one query token
            while (end < rows && (all_visible || q_pos[end] == q_pos[r])) ++end;
            add_values({scratch.weights + r * kTileKeys, kTileKeys, scratch.values, stride,
                        result.out + r * stride, stride, end - r, stride, kTileKeys, true},
                       visible_to(r));
            r = end;
        }
    }

    for (int r = 0; r < rows; ++r) {
        scale_row(result.out + r * stride, stride, states[r].inverse_sum());
        result.lse[r] = states[r].lse();
    }
}

static void attend(const AttentionParams& p, const RowTile& tile, int32_t first_key_tile,
                   int32_t last_key_tile, TileScratch& scratch, Partial result) {
    with_type(p.dtype, [&](auto type) { load_queries<decltype(type)>(p, tile, scratch.queries); });
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

const TileKernels kKernels = {attend, store};
