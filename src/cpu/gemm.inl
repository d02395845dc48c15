// c [rows, columns] = a [rows, depth] * b [depth, columns], or that is added to c; or with the transpose of
// a [depth, rows]. Every element is one chain of multiply-adds in the order of depth, however the matrices
// are cut into blocks.
// Columns: a multiple of kLanes; b and c are padded to it. Included after rows.inl, kBlockRows,
// kBlockVectors.

// What becomes of c: it is replaced, or the chains begin with it, or it is added to their ends, which rounds
// less where many products add up in it.
enum class Into { replaced, chained, added };

// What b is: a matrix of float32,
struct MatrixRows {
    const float* first;
    int64_t stride;

    const float* at(int k) const { return first + k * stride; }
    MatrixRows from(int k) const { return {at(k), stride}; }
    void prefetch_next(int, int, int) const {}
    template <int vector>
    static Vec load_vector(const float* row) {
        return load(row + vector * kLanes);
    }
};

// or rows of any type that lie anywhere, of which the memory is asked for one `ahead` of that in use. Of
// bfloat16, c has the order of load_in_order().
template <class T>
struct ScatteredRows {
    const T* const* rows;
    int64_t offset;  // from there
    int ahead;

    const T* at(int k) const { return rows[k] + offset; }
    ScatteredRows from(int k) const { return {rows + k, offset, ahead}; }
    void prefetch_next(int k, int column, int count) const {
        prefetch_numbers(at(k + ahead) + column, count);
    }
    template <int vector>
    static Vec load_vector(const T* row) {
        return load_in_order<vector>(row);
    }
};

template <class Rows>
struct GemmOf {
    const float* a;
    int64_t a_stride;
    Rows b;
    float* c;
    int64_t c_stride;
    int rows, columns, depth;
    Into into;
};
using Gemm = GemmOf<MatrixRows>;

enum class A { as_it_is, transposed };

template <class Rows, class T, int... vector>
OCTAVO_SIMD void load_vectors(Vec (&to)[sizeof...(vector)], const T* row,
                              std::integer_sequence<int, vector...>) {
    ((to[vector] = Rows::template load_vector<vector>(row)), ...);
}

// The block of c that starts at (row, column), held in registers.
template <A form, int num_rows, int num_vectors, class Rows>
static void multiply_block(const GemmOf<Rows>& g, int row, int column) {
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
        const auto* b = g.b.at(k) + column;
        g.b.prefetch_next(k, column, num_vectors * kLanes);
        Vec b_k[num_vectors];
        load_vectors<Rows>(b_k, b, std::make_integer_sequence<int, num_vectors>{});
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
template <A form, int num_rows, int num_vectors, class Rows>
static void multiply_rest(const GemmOf<Rows>& g, int row, int column) {
    if constexpr (num_rows > 0) {
        if (g.rows - row == num_rows)
            multiply_block<form, num_rows, num_vectors>(g, row, column);
        else
            multiply_rest<form, num_rows - 1, num_vectors>(g, row, column);
    }
}

template <A form, int num_vectors, class Rows>
static void multiply_columns(const GemmOf<Rows>& g, int column) {
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
template <class T>
static void multiply(const GemmOf<ScatteredRows<T>>& g) {
    multiply_columns<A::as_it_is, kBlockVectors>(g, 0);
}
static void multiply_transposed(const Gemm& g) { multiply_columns<A::transposed, kBlockVectors>(g, 0); }
