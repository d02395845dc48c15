// How few rows of a KV head (decode) read keys and values where they lie. Included after key_tile.inl and
// panel.inl.

// Up to kMaxStreamedRows rows of a KV head (decode) read keys and values where they lie: the rows of a
// token's heads lie side by side, and the hardware foresees what comes next. More rows are worth a copy of
// the tile as float32, of keys the transpose. Measured in docs/notebook/cpu.md.
//
// A tile is read in streams: the first keys of its four quarters, then the second ones, and so on, each place
// for all heads, and their values likewise. That is the order in which values are added up, whatever a row
// does not see.
constexpr int kStreams = kPanelRows;
constexpr int kStreamKeys = kTileKeys / kStreams;
constexpr int kAheadPlaces = 8;    // the memory is asked for a row at most this many places before its use,
constexpr int kAheadBytes = 6144;  // and for what lies this far behind what a stream reads

// How many rows before its use the memory is asked for a row of a stream.
template <class T>
static int rows_ahead(int head_dim, int num_heads) {
    const int rows = kAheadBytes / (head_dim * static_cast<int>(sizeof(T)));
    const int most = kAheadPlaces * num_heads;
    return rows < 1 ? 1 : rows < most ? rows : most;
}

// The row to ask for beside that of head 0, `ahead` rows on, then those beside the heads that follow: of
// which place, counted from the one that is read, and of which head.
struct RowAhead {
    int place, head, num_heads;

    RowAhead(int ahead, int num_heads)
        : place(ahead / num_heads), head(ahead % num_heads), num_heads(num_heads) {}
    void advance() {
        if (++head == num_heads) head = 0, ++place;
    }
};

// Which key of a tile is the j-th in the order of streams.
OCTAVO_SIMD int key_of_place(int j) { return j % kStreams * kStreamKeys + j / kStreams; }

// A row of weights from the order of streams to that of keys: lanes `s` of every kStreams become neighbours.
static void from_streams(float* row) {
    static_assert(kStreams == 4);
    constexpr int kVectors = kTileKeys / kLanes;
    Vec half[kVectors];  // the even places, then the odd ones
    for (int i = 0; i < kVectors / 2; ++i) {
        const Vec a = load(row + 2 * i * kLanes), b = load(row + (2 * i + 1) * kLanes);
        half[i] = shuffle<EvenLanes>(a, b);
        half[kVectors / 2 + i] = shuffle<OddLanes>(a, b);
    }
    for (int odd = 0; odd < 2; ++odd) {
        for (int i = 0; i < kVectors / 4; ++i) {
            const Vec* const pair = half + odd * kVectors / 2 + 2 * i;
            store(row + odd * kStreamKeys + i * kLanes, shuffle<EvenLanes>(pair[0], pair[1]));
            store(row + (2 + odd) * kStreamKeys + i * kLanes, shuffle<OddLanes>(pair[0], pair[1]));
        }
    }
}

// And back.
static void to_streams(float* row) {
    constexpr int kVectors = kTileKeys / kLanes;
    Vec half[kVectors];
    for (int odd = 0; odd < 2; ++odd) {
        for (int i = 0; i < kVectors / 4; ++i) {
            const Vec a = load(row + odd * kStreamKeys + i * kLanes);
            const Vec b = load(row + (2 + odd) * kStreamKeys + i * kLanes);
            half[odd * kVectors / 2 + 2 * i] = shuffle<Interleave<0>>(a, b);
            half[odd * kVectors / 2 + 2 * i + 1] = shuffle<Interleave<kLanes / 2>>(a, b);
        }
    }
    for (int i = 0; i < kVectors / 2; ++i) {
        store(row + 2 * i * kLanes, shuffle<Interleave<0>>(half[i], half[kVectors / 2 + i]));
        store(row + (2 * i + 1) * kLanes, shuffle<Interleave<kLanes / 2>>(half[i], half[kVectors / 2 + i]));
    }
}

// The rows of values of a place in all streams, and those that are read next.
template <class T>
struct StreamedValues {
    const T* rows[kStreams];
    const T* next[kStreams];
};

// out [num_rows, stride] += weights [num_rows, kTileKeys], of which the first kStreams count, times these
// rows: every element is one chain of multiply-adds in the order of streams.
template <class T, int... vector>
OCTAVO_SIMD void load_vectors(Vec (&to)[sizeof...(vector)], const T* row,
                              std::integer_sequence<int, vector...>) {
    ((to[vector] = load_in_order<vector>(row)), ...);
}

template <class T, int num_rows, int num_vectors>
OCTAVO_SIMD void add_streamed_block(const StreamedValues<T>& values, int column, const float* weights,
                                    float* out, int64_t stride) {
    Vec sum[num_rows][num_vectors];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < num_vectors; ++v) sum[r][v] = load(out + r * stride + column + v * kLanes);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kStreams; ++i) {
        for (int d = 0; d < num_vectors * kLanes; d += 64 / static_cast<int>(sizeof(T)))
            __builtin_prefetch(values.next[i] + column + d, 0, kSecondLevel);
        Vec value[num_vectors];
        load_vectors(value, values.rows[i] + column, std::make_integer_sequence<int, num_vectors>{});
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; ++r) {
            const float weight = weights[r * kTileKeys + i];
#pragma GCC unroll 8
            for (int v = 0; v < num_vectors; ++v) sum[r][v] += weight * value[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < num_vectors; ++v) store(out + r * stride + column + v * kLanes, sum[r][v]);
    }
}

template <class T, int num_rows, int num_vectors = kBlockVectors>
static void add_streamed_columns(const StreamedValues<T>& values, int column, const float* weights,
                                 float* out, int stride) {
    for (; stride - column >= num_vectors * kLanes; column += num_vectors * kLanes)
        add_streamed_block<T, num_rows, num_vectors>(values, column, weights, out, stride);
    if constexpr (num_vectors > 1)
        add_streamed_columns<T, num_rows, num_vectors / 2>(values, column, weights, out, stride);
}

template <class T, int most_rows = kBlockRows>
static void add_streamed(int num_rows, const StreamedValues<T>& values, const float* weights, float* out,
                         int stride) {
    if constexpr (most_rows == kBlockRows) {
        for (; num_rows > kBlockRows; num_rows -= kBlockRows) {
            add_streamed_columns<T, kBlockRows>(values, 0, weights, out, stride);
            weights += kBlockRows * kTileKeys;
            out += kBlockRows * stride;
        }
    }
    if constexpr (most_rows > 0) {
        if (num_rows == most_rows)
            add_streamed_columns<T, most_rows>(values, 0, weights, out, stride);
        else
            add_streamed<T, most_rows - 1>(num_rows, values, weights, out, stride);
    }
}

// The same of the values `rows`, in the order of streams, that rows of a tile see; the weights of others are
// overwritten. Groups of kStreams are filled up with what changes no bit: minus zero is added.
template <class T>
static void add_seen(const TileMask& mask, const T* const* rows, int64_t offset, float* weights, int stride,
                     float* out) {
    static const T kZeros[kMaxHeadDim] = {};
    mask.for_alike([&](int first, int end) {
        uint64_t seen = 0;
        mask.for_ranges(first, [&](int begin, int visible_end) {
            seen |= ~uint64_t{0} >> (kTileKeys - (visible_end - begin)) << begin;
        });
        int places[kTileKeys], count = 0;
        for (int j = 0; j < kTileKeys; ++j) {
            places[count] = j;
            count += seen >> key_of_place(j) & 1;
        }
        const T* kept[kTileKeys];
        for (int i = 0; i < count; ++i) kept[i] = rows[places[i]] + offset;
        for (int r = first; r < end; ++r) {
            float* const row = weights + r * kTileKeys;
            for (int i = 0; i < count; ++i) row[i] = row[places[i]];
            for (int i = count; i % kStreams != 0; ++i) row[i] = -0.0f;
        }
        for (; count % kStreams != 0; ++count) kept[count] = kZeros;
        for (int j = 0; j < count; j += kStreams) {
            StreamedValues<T> values;
            for (int i = 0; i < kStreams; ++i) values.rows[i] = values.next[i] = kept[j + i];
            add_streamed(end - first, values, weights + first * kTileKeys + j, out + first * stride, stride);
        }
    });
}

// The rows of the first head, behind which those of the others lie, in the order of streams: of a tile, and
// of the first places behind it. In place of what no row sees stands a row that some see: the result for it
// is never used.
template <class T>
struct StreamedRows {
    static constexpr int kCount = kTileKeys + kStreams * kAheadPlaces;
    const T* k[kCount];
    const T* v[kCount];

    static StreamedRows make(const AttentionParams& p, const RowTile& tile, const KeyTiles& tiles,
                             int32_t k_begin, int32_t next_k_begin) {
        const VisibleKeys seen =
            VisibleKeys::make(k_begin, tiles.prefix_end, tiles.window_begin, tiles.window_end);
        const int some = seen.prefix_end > 0 ? 0 : seen.window_begin;
        KeyRows<T, T> here, next;
        find_keys(p, tile, tiles, k_begin, here);
        find_keys(p, tile, tiles, next_k_begin, next);
        const auto hide = [&, k = here.k[some], v = here.v[some]](int begin, int end) {
            for (int j = begin; j < end; ++j) here.k[j] = k, here.v[j] = v;
        };
        hide(seen.prefix_end, seen.window_begin);
        hide(seen.window_end, kTileKeys);
        StreamedRows rows;
        for (int j = 0; j < kCount; ++j) {
            const KeyRows<T, T>& from = j < kTileKeys ? here : next;
            rows.k[j] = from.k[key_of_place(j % kTileKeys)];
            rows.v[j] = from.v[key_of_place(j % kTileKeys)];
        }
        return rows;
    }
};
