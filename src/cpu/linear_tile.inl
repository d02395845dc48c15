// Products with weights. Included after rows.inl and kLinearBlockRows, the rows of x whose sums with those of
// a panel of weights fit in registers.
//
// Lane l of an element's sum adds up the products of every kLanes-th number of the rows, in the order of K,
// and the lanes are added at the end, halves first. Of bfloat16 weights a lane takes two numbers side by
// side, first the second one, since a vector of pairs becomes two of float32 without a shuffle. So the order
// follows from K alone: it is the same however rows are cut into tiles, panels, runs and blocks.

template <class W>
constexpr int kStepNumbers = kStepBytes / sizeof(W);      // of each row in a step
constexpr int kXPadding = kStepBytes / sizeof(uint16_t);  // rows of x are padded to whole steps with zeros

// The vectors of a step.
template <int vector>
OCTAVO_SIMD Vec load_weights(const float* from) {
    return load(from + vector * kLanes);
}
template <int vector>
OCTAVO_SIMD Vec load_weights(const Float16* from) {
    return load_lanes(from + vector * kLanes);
}
template <int vector>
OCTAVO_SIMD Vec load_weights(const BFloat16* from) {
    const BitsVec pairs = load_as<BitsVec>(from + vector / 2 * 2 * kLanes);
    return (Vec)(vector % 2 == 0 ? pairs & 0xffff0000u : pairs << 16);
}

struct OddLanes {
    static constexpr int lane(int l) { return 2 * l + 1; }
};
struct EvenLanes {
    static constexpr int lane(int l) { return 2 * l; }
};

// Brings a row of x into the order of the weights' vectors.
static void arrange(const float*, float*, int64_t) {}
static void arrange(const Float16*, float*, int64_t) {}
static void arrange(const BFloat16*, float* x, int64_t padded) {
    for (int64_t k = 0; k < padded; k += 2 * kLanes) {
        const Vec a = load(x + k), b = load(x + k + kLanes);
        store(x + k, shuffle<OddLanes>(a, b));
        store(x + k + kLanes, shuffle<EvenLanes>(a, b));
    }
}

OCTAVO_SIMD int64_t padded(int64_t depth) { return (depth + kXPadding - 1) / kXPadding * kXPadding; }

// Rows of x lie a line of the cache further apart, so that those of K = 4096 do not meet in one set.
constexpr int kXGap = kStepBytes / sizeof(float);

// A run of K: numbers [begin, begin + length) of every row.
struct Run {
    int64_t begin, length;
};

// The rows of a panel, and of the one that is read next.
template <class W>
struct Panel {
    const W* rows[kPanelRows];
    const W* next[kPanelRows];

    Panel at(int64_t k) const {
        Panel moved = *this;
        for (int i = 0; i < kPanelRows; ++i) {
            moved.rows[i] += k;
            moved.next[i] += k;
        }
        return moved;
    }
};

// The sums of a block: from zero or from `lanes`, to `lanes` or, at the end of K, to `sums`.
struct BlockSums {
    float* lanes;  // [row of x, row of w, lane]
    float* sums;   // [row of x, row of w], rows kSumsStride apart
    bool is_first, is_last;
};

template <int distance>
struct Exchange {  // of neighbours
    static constexpr int lane(int l) { return l ^ distance; }
};
struct EveryQuarter {  // the first lane of each quarter, over and over
    static constexpr int lane(int l) { return l % 4 * (kLanes / 4); }
};

// In every quarter of v: the sum of its lanes, in all of them.
template <int distance = kLanes / 8>
OCTAVO_SIMD Vec sum_of_quarters(Vec v) {
    if constexpr (distance == 0)
        return v;
    else
        return sum_of_quarters<distance / 2>(v + shuffle<Exchange<distance>>(v, v));
}

// The blocks of `size` lanes of a and of b, added in pairs: those of a and those of b in turn.
template <int size>
OCTAVO_SIMD Vec add_blocks(Vec a, Vec b) {
    return shuffle<UpperBlocks<size>>(a, b) + shuffle<LowerBlocks<size>>(a, b);
}

// The sums of the lanes of four vectors, side by side.
OCTAVO_SIMD void store_sums(float* to, const Vec (&v)[kPanelRows]) {
    static_assert(kPanelRows == 4);
    constexpr int kHalf = kLanes / 2, kQuarter = kLanes / 4;
    const Vec of_0_and_2 = add_blocks<kHalf>(v[0], v[2]), of_1_and_3 = add_blocks<kHalf>(v[1], v[3]);
    const Vec sums = sum_of_quarters(add_blocks<kQuarter>(of_0_and_2, of_1_and_3));
    const Vec first = shuffle<EveryQuarter>(sums, sums);
    __builtin_memcpy(to, &first, kPanelRows * sizeof(float));
}

template <class W, int num_rows, int vector = 0>
OCTAVO_SIMD void multiply_step(Vec (&sum)[num_rows][kPanelRows], const W* const (&w)[kPanelRows],
                               const float* x, int64_t x_stride) {
    Vec w_k[kPanelRows];
#pragma GCC unroll 4
    for (int i = 0; i < kPanelRows; ++i) w_k[i] = load_weights<vector>(w[i]);
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
        const Vec x_k = load(x + r * x_stride + vector * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < kPanelRows; ++i) sum[r][i] += x_k * w_k[i];
    }
    if constexpr ((vector + 1) * kLanes < kStepNumbers<W>)
        multiply_step<W, num_rows, vector + 1>(sum, w, x, x_stride);
}

template <class W, int num_rows>
static void multiply_block(const Panel<W>& panel, int64_t length, const float* x, int64_t x_stride,
                           const BlockSums& block) {
    Vec sum[num_rows][kPanelRows];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < kPanelRows; ++i)
            sum[r][i] = block.is_first ? Vec{} : load(block.lanes + (r * kPanelRows + i) * kLanes);
    }
    int64_t k = 0;
    for (; k + kStepNumbers<W> <= length; k += kStepNumbers<W>) {
        const W* w[kPanelRows];
#pragma GCC unroll 4
        for (int i = 0; i < kPanelRows; ++i) {
            w[i] = panel.rows[i] + k;
            __builtin_prefetch(panel.next[i] + k, 0, 2);
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
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
        if (block.is_last) {
            store_sums(block.sums + r * kSumsStride, sum[r]);
            continue;
        }
#pragma GCC unroll 4
        for (int i = 0; i < kPanelRows; ++i) store(block.lanes + (r * kPanelRows + i) * kLanes, sum[r][i]);
    }
}

// Of `num_rows` rows of x, from 1 to kLinearBlockRows.
template <class W, int most_rows = kLinearBlockRows>
static void multiply_rows(int num_rows, const Panel<W>& panel, int64_t length, const float* x,
                          int64_t x_stride, const BlockSums& block) {
    if constexpr (most_rows > 0) {
        if (num_rows == most_rows)
            multiply_block<W, most_rows>(panel, length, x, x_stride, block);
        else
            multiply_rows<W, most_rows - 1>(num_rows, panel, length, x, x_stride, block);
    }
}

// All rows of the tile, in blocks of nearly equal size. `lanes` and `sums` are those of the panel.
template <class W>
static void multiply_panel(const Panel<W>& panel, int64_t length, int num_rows, const float* x,
                           int64_t x_stride, BlockSums block) {
    const int num_blocks = (num_rows + kLinearBlockRows - 1) / kLinearBlockRows;
    Panel<W> reads = panel;
    for (int b = 0; b < num_blocks; ++b) {
        const int begin = num_rows * b / num_blocks, end = num_rows * (b + 1) / num_blocks;
        multiply_rows<W>(end - begin, reads, length, x + begin * x_stride, x_stride,
                         {block.lanes + begin * kPanelRows * kLanes, block.sums + begin * kSumsStride,
                          block.is_first, block.is_last});
        for (int i = 0; i < kPanelRows; ++i) reads.next[i] = panel.rows[i];  // is in the cache already
    }
}

// A row of weights of 16 bits as float32, in the order of their vectors, padded with zeros to whole steps.
template <class W, int vector = 0>
OCTAVO_SIMD void widen_step(const W* from, float* to) {
    store(to + vector * kLanes, load_weights<vector>(from));
    if constexpr ((vector + 1) * kLanes < kStepNumbers<W>) widen_step<W, vector + 1>(from, to);
}
template <class W>
static void widen_row(const W* from, const W* next, int64_t length, float* to) {
    int64_t k = 0;
    for (; k + kStepNumbers<W> <= length; k += kStepNumbers<W>) {
        __builtin_prefetch(next + k, 0, 2);
        widen_step(from + k, to + k);
    }
    if (k == length) return;
    W rest[kStepNumbers<W>] = {};
    __builtin_memcpy(rest, from + k, (length - k) * sizeof(W));
    widen_step(rest, to + k);
}

// One panel over a run of K, of which x holds the tile's rows. Where several blocks of x need the weights,
// these are taken in parts that stay in the first-level cache, and widened once.
template <class W>
static void multiply_run(const Panel<W>& panel, int64_t length, int num_rows, const float* x,
                         int64_t x_stride, BlockSums block, float* widened) {
    if (num_rows <= kLinearBlockRows) return multiply_panel(panel, length, num_rows, x, x_stride, block);
    const bool run_is_last = block.is_last;
    for (int64_t k = 0; k < length; k += kPanelNumbers) {
        const int64_t part = length - k < kPanelNumbers ? length - k : kPanelNumbers;
        block.is_last = run_is_last && k + part == length;
        if constexpr (sizeof(W) == sizeof(float)) {
            multiply_panel(panel.at(k), part, num_rows, x + k, x_stride, block);
        } else {
            Panel<float> floats;
            for (int i = 0; i < kPanelRows; ++i) {
                floats.rows[i] = floats.next[i] = widened + i * kPanelNumbers;
                widen_row(panel.rows[i] + k, panel.next[i] + k, part, widened + i * kPanelNumbers);
            }
            multiply_panel(floats, padded(part), num_rows, x + k, x_stride, block);
        }
        block.is_first = false;
    }
}

// Rows of x in scratch, numbers of the run alone.
template <class T, class W>
static void load_x(const LinearParams& p, const LinearPart& part, const Run& run, float* to,
                   int64_t x_stride) {
    for (int64_t r = 0; r < part.num_rows; ++r, to += x_stride) {
        const T* from = static_cast<const T*>(p.x) + p.offset_of(p.x_rows, part.first_row + r) + run.begin;
        load_row(from, static_cast<int>(run.length), to);
        for (int64_t k = run.length; k < padded(run.length); ++k) to[k] = 0.0f;
        arrange(static_cast<const W*>(nullptr), to, padded(run.length));
    }
}

OCTAVO_SIMD Vec exp(Vec x) { return exp2(x * kLog2e); }

#include "common/activation.inl"

// From sums to a strip of out: bias, activation, residual, one rounding.
template <class T>
static void finish(const LinearParams& p, const LinearPart& part, LinearScratch& scratch) {
    const auto columns = static_cast<int>(part.num_columns);
    const auto* bias = static_cast<const T*>(p.bias);
    if (bias) {
        load_row(bias + part.first_column, columns, scratch.bias);
        if (p.is_gated()) load_row(bias + p.width + part.first_column, columns, scratch.bias + columns);
    }
    for (int64_t r = 0; r < part.num_rows; ++r) {
        float* sums = scratch.sums + r * kSumsStride;
        const int64_t row = part.first_row + r;
        if (p.residual) {
            load_row(
                static_cast<const T*>(p.residual) + p.offset_of(p.residual_rows, row) + part.first_column,
                columns, scratch.residual);
        }
        for (int c = 0; c < columns; c += kLanes) {
            Vec value = load(sums + c);
            if (bias) value += load(scratch.bias + c);
            if (p.activation == Activation::silu) value = silu(value);
            if (p.activation == Activation::gelu) value = gelu(value);
            if (p.is_gated()) {
                Vec up = load(sums + columns + c);
                if (bias) up += load(scratch.bias + columns + c);
                value = silu(value) * up;
            }
            if (p.residual) value += load(scratch.residual + c);
            store(scratch.finished + c, value);
        }
        store_row(scratch.finished, 1.0f, columns,
                  static_cast<T*>(p.out) + p.offset_of(p.out_rows, row) + part.first_column);
    }
}

// The rows of w that a strip of out needs, in panels: padded by rows that are there, whose sums nobody reads.
template <class W>
class Strip {
  public:
    Strip(const LinearParams& p, const LinearPart& part, const LinearPart& next) {
        num_panels_ = add_rows(p, part, 0) / kPanelRows;
        add_rows(p, next.num_columns > 0 ? next : part, num_panels_ * kPanelRows);
    }

    int num_panels() const { return num_panels_; }

    Panel<W> panel(int index) const {
        Panel<W> panel;
        for (int i = 0; i < kPanelRows; ++i) {
            panel.rows[i] = rows_[index * kPanelRows + i];
            panel.next[i] = rows_[(index + 1) * kPanelRows + i];
        }
        return panel;
    }

  private:
    // From place `begin` on; returns the number of rows, padding counted.
    int add_rows(const LinearParams& p, const LinearPart& part, int begin) {
        int end = begin;
        auto add = [&](int64_t first) {
            for (int64_t c = 0; c < part.num_columns; ++c)
                rows_[end++] = static_cast<const W*>(p.w) + (first + part.first_column + c) * p.w_stride;
        };
        add(0);
        if (p.is_gated()) add(p.width);
        for (; (end - begin) % kPanelRows != 0; ++end) rows_[end] = rows_[end - 1];
        return end - begin;
    }

    int num_panels_;
    const W* rows_[2 * kStripRows];
};

template <class T, class W>
static void compute_typed(const LinearParams& p, const LinearPart& all, LinearScratch& scratch) {
    const int64_t strip_columns = p.is_gated() ? kStripRows / 2 : kStripRows;
    auto part_at = [&](int64_t row, int64_t column) {
        const int64_t rows = all.num_rows - row, columns = all.num_columns - column;
        return LinearPart{all.first_row + row, rows < kLinearTileRows ? rows : kLinearTileRows,
                          all.first_column + column, columns < strip_columns ? columns : strip_columns};
    };
    const int64_t most_rows = part_at(0, 0).num_rows;
    const int64_t most_length = (kXNumbers / most_rows - kXGap) / kXPadding * kXPadding;
    const bool x_stays = all.num_rows <= kLinearTileRows && p.depth <= most_length;
    for (int64_t column = 0; column < all.num_columns; column += strip_columns) {
        const Strip<W> strip(p, part_at(0, column), part_at(0, column + strip_columns));
        for (int64_t row = 0; row < all.num_rows; row += kLinearTileRows) {
            const LinearPart part = part_at(row, column);
            const auto num_rows = static_cast<int>(part.num_rows);
            if (p.depth == 0) std::memset(scratch.sums, 0, sizeof scratch.sums);
            for (int64_t begin = 0; begin < p.depth; begin += most_length) {
                const int64_t left = p.depth - begin;
                const Run run{begin, left < most_length ? left : most_length};
                const int64_t x_stride = padded(run.length) + kXGap;
                if (!x_stays || column == 0) load_x<T, W>(p, part, run, scratch.x, x_stride);
                for (int i = 0; i < strip.num_panels(); ++i) {
                    multiply_run(strip.panel(i).at(begin), run.length, num_rows, scratch.x, x_stride,
                                 {scratch.lanes + int64_t{i} * num_rows * kPanelRows * kLanes,
                                  scratch.sums + i * kPanelRows, begin == 0, left == run.length},
                                 scratch.panel);
                }
            }
            finish<T>(p, part, scratch);
        }
    }
}

static void compute_linear(const LinearParams& p, const LinearPart& part, LinearScratch& scratch) {
    with_type(p.dtype, [&](auto x_number) {
        with_type(p.w_dtype, [&](auto w_number) {
            using T = decltype(x_number);
            using W = decltype(w_number);
            if constexpr (std::is_same_v<T, W> || std::is_same_v<T, float>)
                compute_typed<T, W>(p, part, scratch);
        });
    });
}

static const LinearKernels kLinearKernels = {compute_linear};
