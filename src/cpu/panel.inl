// A few rows of x times rows of 32-bit or 16-bit numbers that are read from memory once: the weights of
// linear(), or the keys of attention. Included after rows.inl, kPanelBlockRows, the rows of x whose sums with
// those of a panel fit in registers, and kHasPairProducts with add_pair_products(), where the instruction set
// has them.
//
// Lane l of an element's sum adds up the products of every kLanes-th number of the rows, in the order of K,
// and the lanes are added at the end, halves first. Of bfloat16 a lane takes two numbers side by side, first
// the second one (rows.inl), which is the order of products of pairs, too. So the order follows from K alone:
// it is the same however rows are cut into tiles, panels, runs and blocks.

template <class W>
constexpr int kStepNumbers = kStepBytes / sizeof(W);  // of each row in a step

// The cache into which the memory is asked to bring what is read next. Fewer requests of the first-level one
// may be under way.
constexpr int kSecondLevel = 2;

// The rows of a panel, and where what is read next lies: at each step the memory is asked for a line of the
// cache at each of these places, which then move on by `next_step` numbers.
template <class W>
struct Panel {
    const W* rows[kPanelRows];
    const W* next[kPanelRows];
    int64_t next_step = kStepNumbers<W>;

    Panel at(int64_t k) const {
        Panel moved = *this;
        for (int i = 0; i < kPanelRows; ++i) {
            moved.rows[i] += k;
            moved.next[i] += k / kStepNumbers<W> * next_step;
        }
        return moved;
    }
};

// The sums of a block: from zero or from `lanes`, to `lanes` or, at the end of K, to `sums`.
struct BlockSums {
    float* lanes;  // [row of x, row of w, lane]
    float* sums;   // [row of x, row of w]
    int64_t sums_stride;
    bool is_first, is_last;
};

// The sums of the lanes of a row's four vectors stand side by side, and those of two rows where a vector of
// `kSumLanes` has room. Vectors of 16 lanes are cut in half first: a shuffle of half a vector takes half the
// time.
constexpr int kSumLanes = kLanes < 8 ? kLanes : 8;
constexpr int kSummedRows = kSumLanes / kPanelRows;
typedef float SumVec __attribute__((vector_size(kSumLanes * 4)));

template <class V>
OCTAVO_SIMD SumVec add_halves(V v) {
    if constexpr (sizeof(V) == sizeof(SumVec)) {
        return v;
    } else {
        SumVec half[2];
        __builtin_memcpy(half, &v, sizeof v);
        return half[0] + half[1];
    }
}

// The blocks of `size` lanes of a and of b, added in pairs: those of a and those of b in turn.
template <int size>
OCTAVO_SIMD SumVec add_blocks(SumVec a, SumVec b) {
    return shuffle<UpperBlocks<size, kSumLanes>>(a, b) + shuffle<LowerBlocks<size, kSumLanes>>(a, b);
}

// The sums of the lanes of all vectors [num_rows, kPanelRows], halves first, to `to` [num_rows, stride].
template <int num_rows>
OCTAVO_SIMD void store_sums(float* to, int64_t stride, const Vec (&v)[num_rows][kPanelRows]) {
    static_assert(kPanelRows == 4 && kSummedRows <= 2);
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r += kSummedRows) {
        const int last = r + kSummedRows <= num_rows ? r + kSummedRows - 1 : r;
        SumVec sums[kPanelRows];
#pragma GCC unroll 4
        for (int i = 0; i < kPanelRows; ++i) {
            sums[i] = add_halves(v[r][i]);
            if constexpr (kSummedRows == 2) sums[i] = add_blocks<kPanelRows>(sums[i], add_halves(v[last][i]));
        }
        const SumVec all = add_blocks<1>(add_blocks<2>(sums[0], sums[2]), add_blocks<2>(sums[1], sums[3]));
#pragma GCC unroll 2
        for (int i = 0; i <= last - r; ++i) {
            __builtin_memcpy(to + (r + i) * stride, reinterpret_cast<const float*>(&all) + i * kPanelRows,
                             kPanelRows * sizeof(float));
        }
    }
}

// What rows of x of type T become beside rows of W: float32 in the order of those, or, for products of pairs,
// bfloat16 as they are.
template <class T, class W>
using XOf = std::conditional_t<kHasPairProducts && std::is_same_v<T, BFloat16> && std::is_same_v<W, BFloat16>,
                               BFloat16, float>;

template <class W, int num_rows, int vector = 0>
OCTAVO_SIMD void multiply_step(Vec (&sum)[num_rows][kPanelRows], const W* const (&w)[kPanelRows],
                               const float* x, int64_t x_stride) {
    Vec w_k[kPanelRows];
#pragma GCC unroll 4
    for (int i = 0; i < kPanelRows; ++i) w_k[i] = load_in_order<vector>(w[i]);
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
        const Vec x_k = load(x + r * x_stride + vector * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < kPanelRows; ++i) sum[r][i] += x_k * w_k[i];
    }
    if constexpr ((vector + 1) * kLanes < kStepNumbers<W>)
        multiply_step<W, num_rows, vector + 1>(sum, w, x, x_stride);
}

// The same of pairs, which only an instruction set that has them instantiates.
template <class W, int num_rows>
OCTAVO_SIMD void multiply_step(Vec (&sum)[num_rows][kPanelRows], const W* const (&w)[kPanelRows],
                               const BFloat16* x, int64_t x_stride) {
    using Pairs = std::conditional_t<std::is_same_v<W, BFloat16>, BitsVec, void>;
    static_assert(kStepNumbers<W> == 2 * kLanes);
    Pairs w_k[kPanelRows];
#pragma GCC unroll 4
    for (int i = 0; i < kPanelRows; ++i) w_k[i] = load_as<Pairs>(w[i]);
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
        const Pairs x_k = load_as<Pairs>(x + r * x_stride);
#pragma GCC unroll 4
        for (int i = 0; i < kPanelRows; ++i) sum[r][i] = add_pair_products(sum[r][i], w_k[i], x_k);
    }
}

template <class W, int num_rows, class X>
static void multiply_block(const Panel<W>& panel, int64_t length, const X* x, int64_t x_stride,
                           const BlockSums& block) {
    Vec sum[num_rows][kPanelRows];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < kPanelRows; ++i)
            sum[r][i] = block.is_first ? Vec{} : load(block.lanes + (r * kPanelRows + i) * kLanes);
    }
    int64_t k = 0, ahead = 0;
    for (; k + kStepNumbers<W> <= length; k += kStepNumbers<W>, ahead += panel.next_step) {
        const W* w[kPanelRows];
#pragma GCC unroll 4
        for (int i = 0; i < kPanelRows; ++i) {
            w[i] = panel.rows[i] + k;
            __builtin_prefetch(panel.next[i] + ahead, 0, kSecondLevel);
        }
        multiply_step<W, num_rows>(sum, w, x + k, x_stride);
    }
    if (k < length) {
        W rest[kPanelRows][kStepNumbers<W>] = {};
        const W* w[kPanelRows];
        for (int i = 0; i < kPanelRows; ++i) {
            __builtin_memcpy(rest[i], panel.rows[i] + k, (length - k) * sizeof(W));
            w[i] = rest[i];
        }
        multiply_step<W, num_rows>(sum, w, x + k, x_stride);
    }
    if (block.is_last) {
        store_sums(block.sums, block.sums_stride, sum);
        return;
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < kPanelRows; ++i) store(block.lanes + (r * kPanelRows + i) * kLanes, sum[r][i]);
    }
}

// Multiplies `num_rows` rows of x, from 1 to kPanelBlockRows.
template <class W, int most_rows = kPanelBlockRows, class X>
static void multiply_rows(int num_rows, const Panel<W>& panel, int64_t length, const X* x, int64_t x_stride,
                          const BlockSums& block) {
    if constexpr (most_rows > 0) {
        if (num_rows == most_rows)
            multiply_block<W, most_rows>(panel, length, x, x_stride, block);
        else
            multiply_rows<W, most_rows - 1>(num_rows, panel, length, x, x_stride, block);
    }
}

// All rows of the tile, in blocks of nearly equal size. `lanes` and `sums` are those of the panel.
template <class W, class X>
static void multiply_panel(const Panel<W>& panel, int64_t length, int num_rows, const X* x, int64_t x_stride,
                           BlockSums block) {
    const int num_blocks = (num_rows + kPanelBlockRows - 1) / kPanelBlockRows;
    Panel<W> reads = panel;
    for (int b = 0; b < num_blocks; ++b) {
        // A block asks for its share of the next rows: asked for by the first one alone, they keep it
        // waiting, and the memory has nothing to do during the others. In place of the rest stands what is
        // cached.
        for (int i = 0; i < kPanelRows; ++i)
            reads.next[i] = i * num_blocks / kPanelRows == b ? panel.next[i] : panel.rows[i];
        const int begin = num_rows * b / num_blocks, end = num_rows * (b + 1) / num_blocks;
        multiply_rows<W>(end - begin, reads, length, x + begin * x_stride, x_stride,
                         {block.lanes + begin * kPanelRows * kLanes, block.sums + begin * block.sums_stride,
                          block.sums_stride, block.is_first, block.is_last});
    }
}
