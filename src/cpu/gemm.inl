// c [rows, columns] = a [rows, depth] * b [depth, columns], or that is added to c; or with the transpose of
// a [depth, rows]. Every element is one chain of multiply-adds in the order of depth, however the matrices
// are cut into blocks.
// Columns: a multiple of kLanes; b and c are padded to it. Included after rows.inl, kBlockRows,
// kBlockVectors.

// What becomes of c: it is replaced, or the chains begin with it, or it is added to their ends, which rounds
// less where many products add up in it.
enum class Into { replaced, chained, added };

struct Gemm {
    const float* a;
    int64_t a_stride;
    const float* b;
    int64_t b_stride;
    float* c;
    int64_t c_stride;
    int rows, columns, depth;
    Into into;
};

enum class A { as_it_is, transposed };

// The block of c that starts at (row, column), held in registers.
template <A form, int num_rows, int num_vectors>
static void multiply_block(const Gemm& g, int row, int column) {
    constexpr bool kTransposed = form == A::transposed;
    const float* a = g.a + (kTransposed ? row : row * g.a_stride);
    float* c = g.c + row * g.c_stride + column;
    Vec sum[num_rows][num_vectors];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < num_vectors; ++v) {
            sum[r][v] = g.into == Into::chained ? load(c + r * g.c_stride + v * kLanes) : Vec{};
        }
    }
    for (int k = 0; k < g.depth; ++k) {
        const float* b = g.b + k * g.b_stride + column;
        Vec b_k[num_vectors];
#pragma GCC unroll 8
        for (int v = 0; v < num_vectors; ++v) b_k[v] = load(b + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; ++r) {
            float a_rk = kTransposed ? a[k * g.a_stride + r] : a[r * g.a_stride + k];
#pragma GCC unroll 8
            for (int v = 0; v < num_vectors; ++v) sum[r][v] += a_rk * b_k[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < num_vectors; ++v) {
            float* const to = c + r * g.c_stride + v * kLanes;
            store(to, g.into == Into::added ? load(to) + sum[r][v] : sum[r][v]);
        }
    }
}

// The last rows, fewer than a full block.
template <A form, int num_rows, int num_vectors>
static void multiply_rest(const Gemm& g, int row, int column) {
    if constexpr (num_rows > 0) {
        if (g.rows - row == num_rows)
            multiply_block<form, num_rows, num_vectors>(g, row, column);
        else
            multiply_rest<form, num_rows - 1, num_vectors>(g, row, column);
    }
}

template <A form, int num_vectors>
static void multiply_columns(const Gemm& g, int column) {
    for (; g.columns - column >= num_vectors * kLanes; column += num_vectors * kLanes) {
        int row = 0;
        for (; row + kBlockRows <= g.rows; row += kBlockRows) {
            multiply_block<form, kBlockRows, num_vectors>(g, row, column);
        }
        multiply_rest<form, kBlockRows - 1, num_vectors>(g, row, column);
    }
    if constexpr (num_vectors > 1) multiply_columns<form, num_vectors / 2>(g, column);
}

static void multiply(const Gemm& g) { multiply_columns<A::as_it_is, kBlockVectors>(g, 0); }
static void multiply_transposed(const Gemm& g) { multiply_columns<A::transposed, kBlockVectors>(g, 0); }
