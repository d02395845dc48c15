// rms_norm on a GPU against the CPU: rows of every length of work, with and without pieces of 16 bytes.
#include "cuda_testing.h"

#include <octavo/rms_norm.h>

namespace octavo {
namespace {

class CudaRmsNormTest : public ::testing::TestWithParam<unsigned> {};

// Sums of squares are added in another order, so that a result may be rounded to the next number.
void expect_next_to(const std::vector<uint16_t>& gpu, const std::vector<uint16_t>& cpu, DType dtype) {
    const float spacing = dtype == DType::float16 ? 1.0f / 1024 : 1.0f / 128;
    for (size_t i = 0; i < gpu.size(); ++i) {
        const float want = from_bits(cpu[i], dtype), got = from_bits(gpu[i], dtype);
        ASSERT_LE(std::fabs(got - want), spacing * std::fabs(want) + 1e-7f) << "element " << i;
    }
}

TEST_P(CudaRmsNormTest, AgreesWithTheCpu) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t tokens = random.pick({1, 9}), heads = random.pick({1, 3});
    const int64_t dim = random.pick({1, 8, 63, 128, 576, 1001, 4096, 8200, 16384, 16392, 20001});
    const int64_t gap = random.pick({0, 0, 3, 8}), row = dim + gap;  // elements between rows
    const bool has_residual = random.one_in(2), is_in_place = random.one_in(2), is_float32 = random.one_in(2);
    const size_t count = tokens * heads * row;
    Mirror<uint16_t> x(random.normal(count, dtype)), residual(random.normal(count, dtype)),
        out(nans(count, dtype)), residual_out(nans(count, dtype)), weight(random.normal(dim, dtype));
    std::vector<float> wide(dim);
    for (int64_t d = 0; d < dim; ++d) wide[d] = from_bits(weight.host[d], dtype) + 0.001f;
    Mirror<float> wide_weight(wide);

    RmsNormArgs args;
    args.eps = 1e-5;
    auto run = [&](auto view) {
        auto rows = [&](Mirror<uint16_t>& mirror) {
            TensorView t = view(mirror, dtype, {tokens, heads, row});
            t.shape[2] = dim;
            return t;
        };
        args.x = rows(x);
        args.weight = is_float32 ? view(wide_weight, DType::float32, {dim}) : view(weight, dtype, {dim});
        args.out = rows(is_in_place ? x : out);
        if (has_residual) {
            args.residual = rows(residual);
            args.residual_out = rows(is_in_place ? residual : residual_out);
        }
        rms_norm(args);
    };
    run(kOnGpu);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    run(kOnHost);
    Mirror<uint16_t>& normalised = is_in_place ? x : out;
    Mirror<uint16_t>& sums = is_in_place ? residual : residual_out;
    auto without_gaps = [&](const std::vector<uint16_t>& values) {
        std::vector<uint16_t> rows;
        for (size_t i = 0; i < values.size(); ++i) {
            if (static_cast<int64_t>(i) % row < dim) rows.push_back(values[i]);
        }
        return rows;
    };
    expect_next_to(without_gaps(normalised.fetch()), without_gaps(normalised.host), dtype);
    EXPECT_EQ(sums.fetch(), sums.host);  // bit for bit, and nothing between rows
    if (is_in_place) return;
    const std::vector<uint16_t> written = out.fetch();
    for (size_t i = 0; i < count; ++i) {
        const bool is_gap = static_cast<int64_t>(i) % row >= dim;
        ASSERT_TRUE(!is_gap || std::isnan(from_bits(written[i], dtype)))
            << "the gap at " << i << " was written";
    }
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaRmsNormTest, ::testing::Range(0u, 40u));

// Each reads what the one before it writes, which programmatic dependent launch lets it overlap.
TEST(CudaRmsNorm, ChainsReadFinishedResults) {
    const DType dtype = DType::bfloat16;
    const int64_t rows = 4 * num_sms(), dim = 4096;
    Random random(1);
    const std::vector<uint16_t> start = random.normal(rows * dim, dtype);
    Mirror<uint16_t> x(start), residual(start), weight(random.normal(dim, dtype));
    std::vector<uint16_t> first;
    for (int round = 0; round < 20; ++round) {
        x.upload(start);
        residual.upload(start);
        for (int i = 0; i < 30; ++i) {
            RmsNormArgs args;
            args.x = args.out = x.on_gpu(dtype, {rows, dim});
            args.residual = args.residual_out = residual.on_gpu(dtype, {rows, dim});
            args.weight = weight.on_gpu(dtype, {dim});
            rms_norm(args);
            ASSERT_TRUE(round > 0 || cudaDeviceSynchronize() == cudaSuccess);  // at first one by one
        }
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        if (round == 0) first = x.fetch();
        ASSERT_EQ(x.fetch(), first) << "round " << round;
    }
}

}  // namespace
}  // namespace octavo
