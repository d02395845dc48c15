// Products with weights, in the order of addition of panel.inl. Included after it and kMaxDirectRows, the
// most rows of x beside which weights of 16 bits are read as they are, and not widened first.

constexpr int kXPadding = kStepBytes / sizeof(uint16_t);  // rows of x are padded to whole steps with zeros

OCTAVO_SIMD int64_t padded(int64_t depth) { return (depth + kXPadding - 1) / kXPadding * kXPadding; }

// Rows of x lie a line of the cache further apart, so that those of K = 4096 do not meet in one set.
constexpr int kXGap = kXPadding;

// A run of K: numbers [begin, begin + length) of every row.
struct Run {
    int64_t begin, length;
};

// A row of weights of 16 bits as float32, in the order of their vectors, padded with zeros to whole steps.
template <class W, int vector = 0>
OCTAVO_SIMD void widen_step(const W* from, float* to) {
    store(to + vector * kLanes, load_in_order<vector>(from));
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
// these are taken in parts that stay in the first-level cache, and where more than kMaxDirectRows rows do,
// widened once.
template <class W, class X>
static void multiply_run(const Panel<W>& panel, int64_t length, int num_rows, const X* x, int64_t x_stride,
                         BlockSums block, float* widened) {
    if (num_rows <= kPanelBlockRows) return multiply_panel(panel, length, num_rows, x, x_stride, block);
    constexpr int64_t kPartNumbers = kPartBytes / sizeof(W);
    constexpr bool kMayWiden = sizeof(W) < sizeof(X) && kMaxDirectRows < kLinearTileRows;
    const bool run_is_last = block.is_last;
    for (int64_t k = 0; k < length; k += kPartNumbers) {
        const int64_t part = length - k < kPartNumbers ? length - k : kPartNumbers;
        block.is_last = run_is_last && k + part == length;
        if (!kMayWiden || num_rows <= kMaxDirectRows) {
            multiply_panel(panel.at(k), part, num_rows, x + k, x_stride, block);
        } else if constexpr (kMayWiden) {
            Panel<float> floats;
            for (int i = 0; i < kPanelRows; ++i) {
                floats.rows[i] = floats.next[i] = widened + i * kPartNumbers;
                widen_row(panel.rows[i] + k, panel.next[i] + k, part, widened + i * kPartNumbers);
            }
            multiply_panel(floats, padded(part), num_rows, x + k, x_stride, block);
        }
        block.is_first = false;
    }
}

// Rows of x in scratch, numbers of the run alone.
template <class T, class W, class X>
static void load_x(const LinearParams& p, const LinearPart& part, const Run& run, X* to, int64_t x_stride) {
    for (int64_t r = 0; r < part.num_rows; ++r, to += x_stride) {
        const T* from = static_cast<const T*>(p.x) + p.offset_of(p.x_rows, part.first_row + r) + run.begin;
        if constexpr (std::is_same_v<X, float>)
            load_row(from, static_cast<int>(run.length), to);
        else
            std::memcpy(to, from, run.length * sizeof(X));
        for (int64_t k = run.length; k < padded(run.length); ++k) to[k] = {};
        if constexpr (std::is_same_v<X, float>)
            arrange(static_cast<const W*>(nullptr), to, padded(run.length));
    }
}

OCTAVO_SIMD Vec exp(Vec x) { return exp2(x * kLog2e); }
OCTAVO_SIMD Vec divide(Vec x, Vec y) { return x / y; }

#include "common/activation.inl"

// Turns sums into a strip of out: bias, activation, residual, one rounding.
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
    Strip(const LinearParams& p, const LinearPart& part, const LinearPart& next) : depth_(p.depth) {
        // Short rows that lie one behind the other are asked for in the order of their addresses, which is
        // faster than at four places of a page (docs/notebook/cpu.md). Only beside one block of x: of
        // several, each asks for some of the rows (multiply_panel).
        const bool rows_are_short = p.depth * int64_t{sizeof(W)} <= kShortRowBytes;
        in_order_ = rows_are_short && p.w_stride == p.depth && part.num_rows <= kPanelBlockRows;
        num_panels_ = add_rows(p, part, 0) / kPanelRows;
        add_rows(p, next.num_columns > 0 ? next : part, num_panels_ * kPanelRows);
    }

    int num_panels() const { return num_panels_; }

    Panel<W> panel(int index) const {
        const W* const* const rows = rows_ + index * kPanelRows;
        const W* const* const next = rows + kPanelRows;
        const bool in_order = in_order_ && next[kPanelRows - 1] - next[0] == (kPanelRows - 1) * depth_;
        Panel<W> panel;
        for (int i = 0; i < kPanelRows; ++i) {
            panel.rows[i] = rows[i];
            panel.next[i] = in_order ? next[0] + i * kStepNumbers<W> : next[i];
        }
        if (in_order) panel.next_step = kPanelRows * kStepNumbers<W>;
        return panel;
    }

  private:
    // Fills the places from `begin` on, and returns the number of rows, padding counted.
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
    int64_t depth_;
    bool in_order_;
    const W* rows_[2 * kStripRows];
};

template <class T, class W>
static void compute_typed(const LinearParams& p, const LinearPart& all, LinearScratch& scratch) {
    using X = XOf<T, W>;
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
                X* const x = reinterpret_cast<X*>(scratch.x);
                if (!x_stays || column == 0) load_x<T, W>(p, part, run, x, x_stride);
                for (int i = 0; i < strip.num_panels(); ++i) {
                    multiply_run(strip.panel(i).at(begin), run.length, num_rows, x, x_stride,
                                 {scratch.lanes + int64_t{i} * num_rows * kPanelRows * kLanes,
                                  scratch.sums + i * kPanelRows, kSumsStride, begin == 0, left == run.length},
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
