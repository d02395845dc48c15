// Rows of rms_norm. Included inside the namespace of one instruction set, after rows.inl.

template <class T>
static void add_rows(const T* a, const T* b, int n, T* sum) {
    int d = 0;
    for (; d + kLanes <= n; d += kLanes) store_lanes(sum + d, load_lanes(a + d) + load_lanes(b + d));
    for (; d < n; ++d) from_float(to_float(a[d]) + to_float(b[d]), sum[d]);
}

template <class T>
static float sum_of_squares(const T* row, int n) {
    constexpr int kSums = 4;  // side by side, since each addition waits for the one before it
    Vec sums[kSums] = {};
    int d = 0;
    for (; d + kSums * kLanes <= n; d += kSums * kLanes) {
#pragma GCC unroll 4
        for (int i = 0; i < kSums; ++i) {
            const Vec x = load_lanes(row + d + i * kLanes);
            sums[i] += x * x;
        }
    }
    for (; d + kLanes <= n; d += kLanes) sums[0] += load_lanes(row + d) * load_lanes(row + d);
    float rest = 0.0f;  // apart from the long sum, which would round with each addition
    for (; d < n; ++d) rest += to_float(row[d]) * to_float(row[d]);
    return sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

template <class T, class Weight>
static void scale_row(const T* row, float factor, const Weight* weight, int n, T* out) {
    int d = 0;
    for (; d + kLanes <= n; d += kLanes)
        store_lanes(out + d, load_lanes(row + d) * factor * load_lanes(weight + d));
    for (; d < n; ++d) from_float(to_float(row[d]) * factor * to_float(weight[d]), out[d]);
}

template <class T, class Weight>
static void normalise_typed(const RmsNormParams& p, int64_t first_row, int64_t end_row) {
    for (int64_t row = first_row; row < end_row; ++row) {
        const int64_t inner = row % p.shape[2], outer = row / p.shape[2];
        auto at = [&](const int64_t (&strides)[3]) {
            return outer / p.shape[1] * strides[0] + outer % p.shape[1] * strides[1] + inner * strides[2];
        };
        const T* x = static_cast<const T*>(p.x) + at(p.x_strides);
        if (p.residual) {
            T* const sum = static_cast<T*>(p.residual_out) + at(p.residual_out_strides);
            add_rows(x, static_cast<const T*>(p.residual) + at(p.residual_strides), p.dim, sum);
            x = sum;
        }
        const float mean = sum_of_squares(x, p.dim) / static_cast<float>(p.dim);
        scale_row(x, 1.0f / __builtin_sqrtf(mean + p.eps), static_cast<const Weight*>(p.weight), p.dim,
                  static_cast<T*>(p.out) + at(p.out_strides));
    }
}

static void normalise(const RmsNormParams& p, int64_t first_row, int64_t end_row) {
    with_type(p.dtype, [&](auto type) {
        using T = decltype(type);
        if (p.weight_dtype == p.dtype) return normalise_typed<T, T>(p, first_row, end_row);
        normalise_typed<T, float>(p, first_row, end_row);
    });
}

constexpr RmsNormKernels kRmsNormKernels = {normalise};
