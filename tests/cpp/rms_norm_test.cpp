// RMSNorm through the public header, on the CPU, against the formula.
#include <octavo/rms_norm.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace octavo {
namespace {

std::vector<float> normal(size_t count, unsigned seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(engine);
    return values;
}

// Row by row, in double.
void expect_norm(const std::vector<float>& out, const std::vector<float>& x, const std::vector<float>& weight,
                 double eps) {
    const size_t dim = weight.size();
    for (size_t begin = 0; begin < x.size(); begin += dim) {
        double squares = 0.0;
        for (size_t d = 0; d < dim; ++d) squares += double{x[begin + d]} * x[begin + d];
        const double factor = 1.0 / std::sqrt(squares / static_cast<double>(dim) + eps);
        for (size_t d = 0; d < dim; ++d) {
            const double expected = x[begin + d] * factor * weight[d];
            ASSERT_NEAR(out[begin + d], expected, 1e-6 * std::fabs(expected)) << begin + d;
        }
    }
}

TEST(RmsNorm, IsTheFormula) {
    for (const int64_t dim : {1, 15, 64, 1000}) {
        std::vector<float> x = normal(6 * dim, 1), weight = normal(dim, 2), out(x.size(), NAN);
        RmsNormArgs args;
        args.x = {x.data(), DType::float32, {2, 3, dim}};
        args.weight = {weight.data(), DType::float32, {dim}};
        args.out = {out.data(), DType::float32, {2, 3, dim}};
        rms_norm(args);
        expect_norm(out, x, weight, 1e-6);
        args.eps = 0.5;
        args.out = args.x;
        const std::vector<float> before = x;
        rms_norm(args);
        expect_norm(x, before, weight, 0.5);
    }
}

TEST(RmsNorm, AddsTheResidual) {
    const int64_t dim = 77;
    std::vector<float> x = normal(4 * dim, 1), residual = normal(x.size(), 2), weight = normal(dim, 3);
    std::vector<float> sums(x.size());
    for (size_t i = 0; i < x.size(); ++i) sums[i] = x[i] + residual[i];
    RmsNormArgs args;
    args.x = args.out = {x.data(), DType::float32, {4, dim}};
    args.weight = {weight.data(), DType::float32, {dim}};
    args.residual = args.residual_out = TensorView(residual.data(), DType::float32, {4, dim});
    rms_norm(args);
    EXPECT_EQ(residual, sums);
    expect_norm(x, sums, weight, 1e-6);
    args.residual_out.reset();
    EXPECT_THROW(rms_norm(args), ValueError);
}

// The third of four heads of each token, whose axes are one behind the other in no array.
TEST(RmsNorm, TakesAnyStrides) {
    const int64_t tokens = 3, dim = 16;
    std::vector<float> x = normal(tokens * 2 * 4 * dim, 1), weight = normal(dim, 2),
                       out(tokens * 2 * dim, NAN);
    RmsNormArgs args;
    args.x = {x.data() + 2 * dim, DType::float32, {tokens, 2, dim}};
    args.x.strides = {4 * dim, tokens * 4 * dim, 1};
    args.weight = {weight.data(), DType::float32, {dim}};
    args.out = {out.data(), DType::float32, {tokens, 2, dim}};
    rms_norm(args);
    std::vector<float> rows;
    for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t half = 0; half < 2; ++half) {
            const float* const row = x.data() + half * tokens * 4 * dim + token * 4 * dim + 2 * dim;
            rows.insert(rows.end(), row, row + dim);
        }
    }
    expect_norm(out, rows, weight, 1e-6);
}

}  // namespace
}  // namespace octavo
