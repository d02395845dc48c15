// linear on a GPU against the CPU: products of every shape and alignment as a caller gets them, and every
// tile of sm90_linear. What lies between rows is NaN, and stays what it was in the result.
#include "checks/checks.h"
#include "cuda/linear/plan.h"
#include "cuda/linear/run.h"
#include "cuda_testing.h"

#include <octavo/linear.h>

#include <optional>

namespace octavo {
namespace {

using cuda::Sm90LinearKernel;
using cuda::Sm90LinearTile;

constexpr std::optional<Activation> kActivations[] = {std::nullopt, Activation::silu, Activation::gelu,
                                                      Activation::silu_gate};

enum class Norm : uint8_t { none, like_x, float32 };  // the type of its weights

// A product on both devices.
class Product {
  public:
    Product(Random& random, DType dtype, int64_t rows, int64_t width, int64_t depth, int64_t gap)
        : Product(random, dtype, rows, width, depth, gap, random.pick({0, 1, 2, 3}), random.one_in(2),
                  random.one_in(2), random.pick({Norm::none, Norm::like_x, Norm::float32})) {}

    Product(Random& random, DType dtype, int64_t rows, int64_t width, int64_t depth, int64_t gap,
            int activation, bool has_bias, bool has_residual, Norm norm = Norm::none)
        : dtype_(dtype),
          rows_(rows),
          width_(width),
          depth_(depth),
          row_(depth + gap),
          out_row_(width + gap),
          activation_(kActivations[activation]),
          has_bias_(has_bias),
          has_residual_(has_residual),
          norm_(norm),
          w_rows_(activation_ == Activation::silu_gate ? 2 * width : width),
          x_(with_gaps(random.normal(rows * depth, dtype), depth, row_)),
          w_(with_gaps(scaled(random.normal(w_rows_ * depth, dtype)), depth, row_)),
          bias_(random.normal(w_rows_, dtype)),
          residual_(with_gaps(random.normal(rows * width, dtype), width, out_row_)),
          norm_weight_(random.normal(depth, dtype)),
          float_norm_weight_(as_floats(norm_weight_.host)),
          normalised_(normalised()),
          out_(nans(rows * out_row_, dtype)) {
        LinearArgs on_host = args(kOnHost);
        linear(on_host);
        for (int64_t i = 0; i < rows * width; ++i) allowance_.push_back(allowance(i / width, i % width));
    }

    template <class View>
    LinearArgs args(View view) {
        auto rows_of = [&](Mirror<uint16_t>& mirror, int64_t count, int64_t length, int64_t row) {
            TensorView t = view(mirror, dtype_, {count, row});
            t.shape[1] = length;
            return t;
        };
        LinearArgs args;
        args.x = rows_of(x_, rows_, depth_, row_);
        args.w = rows_of(w_, w_rows_, depth_, row_);
        args.out = rows_of(out_, rows_, width_, out_row_);
        if (has_bias_) args.bias = view(bias_, dtype_, {w_rows_});
        if (has_residual_) args.residual = rows_of(residual_, rows_, width_, out_row_);
        args.activation = activation_;
        if (norm_ == Norm::like_x) args.norm_weight = view(norm_weight_, dtype_, {depth_});
        if (norm_ == Norm::float32) args.norm_weight = view(float_norm_weight_, DType::float32, {depth_});
        args.norm_eps = 1e-3;
        return args;
    }

    // Compares the GPU's result with the CPU's, and forgets it.
    void expect_result() {
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const std::vector<uint16_t> gpu = out_.fetch();
        for (size_t i = 0; i < gpu.size(); ++i) {
            const float got = from_bits(gpu[i], dtype_), want = from_bits(out_.host[i], dtype_);
            const auto row = static_cast<int64_t>(i) / out_row_, column = static_cast<int64_t>(i) % out_row_;
            if (column >= width_) {
                ASSERT_TRUE(std::isnan(got)) << "the gap at " << i << " was written";
            } else {  // the order of addition differs, so that a result may be rounded to the next number
                ASSERT_LE(std::fabs(got - want),
                          spacing() * std::fabs(want) + allowance_[row * width_ + column])
                    << "row " << row << ", column " << column;
            }
        }
        out_.upload(nans(gpu.size(), dtype_));
    }

    // The root of the mean square by which the GPU's result differs from the product of unrounded numbers.
    double error() const {
        const std::vector<uint16_t> gpu = out_.fetch();
        double squares = 0;
        for (int64_t row = 0; row < rows_; ++row) {
            for (int64_t column = 0; column < width_; ++column) {
                const double got = from_bits(gpu[row * out_row_ + column], dtype_);
                squares += std::pow(got - sum_of(row, column).value, 2);
            }
        }
        return std::sqrt(squares / static_cast<double>(rows_ * width_));
    }

    std::vector<uint16_t> result() const { return out_.fetch(); }
    int64_t out_row() const { return out_row_; }

  private:
    // A sum of products with normalised x and the root of the sum of their squares, of unrounded numbers.
    struct Sum {
        double value, spread;
    };

    float at(const Mirror<uint16_t>& mirror, int64_t i) const { return from_bits(mirror.host[i], dtype_); }
    float spacing() const { return dtype_ == DType::float16 ? 1.0f / 1024 : 1.0f / 128; }

    std::vector<double> normalised() const {
        std::vector<double> all;
        for (int64_t row = 0; row < rows_; ++row) {
            double squares = 0;
            for (int64_t k = 0; k < depth_; ++k) squares += std::pow(at(x_, row * row_ + k), 2);
            const double factor = 1 / std::sqrt(squares / static_cast<double>(depth_) + 1e-3);
            for (int64_t k = 0; k < depth_; ++k)
                all.push_back(at(x_, row * row_ + k) * factor * at(norm_weight_, k));
        }
        return all;
    }

    Sum sum_of(int64_t row, int64_t w_row) const {
        double sum = 0, squares = 0;
        for (int64_t k = 0; k < depth_; ++k) {
            const double product = normalised_[row * depth_ + k] * at(w_, w_row * row_ + k);
            sum += product;
            squares += product * product;
        }
        return {sum, std::sqrt(squares)};
    }

    // By how much a result may differ from the CPU's before it is rounded. With a norm both round the factors
    // of a sum, in places of their own: x times the weights of the norm, divided or not. The difference of
    // two such errors is 0.6 of half a spacing times the spread in the mean square, and six to seven times
    // that is allowed, which the activation takes on: the slopes of silu and gelu are below 1.13. A residual
    // may cancel what the gate has made large.
    float allowance(int64_t row, int64_t column) const {
        constexpr double kLeast = 3e-5, kSteepest = 1.13;
        if (norm_ == Norm::none) return kLeast;
        auto error = [&](const Sum& sum) { return 2.0 * spacing() * sum.spread; };
        const Sum sum = sum_of(row, column);
        if (activation_ != Activation::silu_gate) return kLeast + kSteepest * error(sum);
        const Sum other = sum_of(row, width_ + column);
        auto biased = [&](const Sum& sum, int64_t w_row) {
            return sum.value + (has_bias_ ? at(bias_, w_row) : 0.0);
        };
        const double gate = biased(sum, column), factor = biased(other, width_ + column);
        return kLeast + std::fabs(gate / (1 + std::exp(-gate))) * error(other) +
               kSteepest * error(sum) * (std::fabs(factor) + error(other));
    }

    std::vector<float> as_floats(const std::vector<uint16_t>& values) const {
        std::vector<float> floats;
        for (uint16_t x : values) floats.push_back(from_bits(x, dtype_));
        return floats;
    }
    std::vector<uint16_t> scaled(std::vector<uint16_t> values) const {
        const float scale = 1.0f / std::sqrt(static_cast<float>(std::max<int64_t>(depth_, 1)));
        for (uint16_t& x : values) x = to_bits(from_bits(x, dtype_) * scale, dtype_);
        return values;
    }
    std::vector<uint16_t> with_gaps(const std::vector<uint16_t>& values, int64_t length, int64_t row) const {
        std::vector<uint16_t> all = nans(length == 0 ? 0 : values.size() / length * row, dtype_);
        for (size_t i = 0; i < values.size(); ++i) all[i / length * row + i % length] = values[i];
        return all;
    }

    const DType dtype_;
    const int64_t rows_, width_, depth_, row_, out_row_;
    const std::optional<Activation> activation_;
    const bool has_bias_, has_residual_;
    const Norm norm_;
    const int64_t w_rows_;
    Mirror<uint16_t> x_, w_, bias_, residual_, norm_weight_;
    Mirror<float> float_norm_weight_;
    const std::vector<double> normalised_;  // [rows][depth]
    std::vector<float> allowance_;          // [rows][width]
    Mirror<uint16_t> out_;
};

class CudaLinearTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(CudaLinearTest, AgreesWithTheCpu) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t rows = random.pick({1, 2, 7, 8, 9, 16, 17, 40, 64, 65, 130, 200});
    const int64_t width = random.pick({1, 5, 8, 33, 64, 130, 576, 1000});
    const int64_t depth = random.pick({0, 1, 7, 8, 64, 72, 100, 576, 1000, 1536, 4096});
    Product product(random, dtype, rows, width, depth, random.pick({0, 0, 1, 8, 24}));
    LinearArgs args = product.args(kOnGpu);
    args.static_weight = random.one_in(2);
    args.batch_invariant = random.one_in(3);
    linear(args);
    product.expect_result();
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaLinearTest, ::testing::Range(0u, 250u));

// Launches a product in one tile, with each number of splits and of CTAs on an SM that there is room for.
void expect_right_in_all_splits(Product& product, const Sm90LinearTile& tile, bool normalises) {
    for (int32_t splits : {1, 2, 4, 8}) {
        for (int32_t ctas_per_sm : {1, 2}) {
            LinearArgs args = product.args(kOnGpu);
            args.static_weight = ctas_per_sm == 1;
            const LinearParams params = check_linear(args);
            Sm90LinearTile launched = tile;
            launched.splits = splits;
            launched.ctas_per_sm = ctas_per_sm;
            const auto plan =
                cuda::plan_sm90_linear({params.num_rows, params.w_rows(), params.depth}, params.dtype,
                                       *cuda::find_gpu("h100"), launched, normalises);
            if (!plan) continue;
            SCOPED_TRACE(testing::Message() << cuda::describe(*plan).to_string() << ", K " << params.depth);
            cuda::run(params, *plan, nullptr);
            product.expect_result();
            if (testing::Test::HasFatalFailure()) return;
        }
    }
}

// Without hitting a table's entry: the rows and the width follow from the tile.
class CudaLinearTileTest : public ::testing::TestWithParam<Sm90LinearTile> {};

TEST_P(CudaLinearTileTest, AgreesWithTheCpu) {
    if (!is_hopper()) GTEST_SKIP() << "needs sm_90a";
    const Sm90LinearTile tile = GetParam();
    Random random(static_cast<unsigned>(tile.w_rows * 1000 + tile.x_rows));
    const int64_t width = random.pick({3, 1}) * tile.w_rows + random.pick({0, 8, -5});
    const int64_t rows = tile.x_rows - random.pick({0, 1, 3}) + random.pick({0, 0, 2}) * tile.x_rows;
    const int64_t depth = random.pick({64, 576, 1000, 2048});
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    for (int activation : {0, 1, 3}) {
        Product product(random, dtype, rows, width, depth, 8, activation, activation > 0, activation > 1);
        expect_right_in_all_splits(product, tile, false);
        if (HasFatalFailure()) return;
    }
}

bool has_norm(const Sm90LinearTile& tile) {
    return tile.kernel == Sm90LinearKernel::flat && tile.x_rows <= cuda::kMostNormalisedXRows;
}

class CudaLinearNormTest : public CudaLinearTileTest {};

TEST_P(CudaLinearNormTest, AgreesWithTheCpu) {
    if (!is_hopper()) GTEST_SKIP() << "needs sm_90a";
    const Sm90LinearTile tile = GetParam();
    Random random(static_cast<unsigned>(tile.w_rows * 1000 + tile.x_rows));
    for (int64_t depth : {8, 64, 576, 1000, 2048, 4096}) {
        const int64_t width = random.pick({3, 1}) * tile.w_rows + random.pick({0, 8, -5});
        const int64_t rows = tile.x_rows - random.pick({0, 1, 3}) + random.pick({0, 0, 2}) * tile.x_rows;
        const int activation = random.pick({0, 1, 3});
        Product product(random, DType::bfloat16, rows, width, depth, 8, activation, random.one_in(2),
                        random.one_in(2), Norm::like_x);
        expect_right_in_all_splits(product, tile, true);
        if (HasFatalFailure()) return;
    }
}

std::vector<Sm90LinearTile> all_tiles() {
    std::vector<Sm90LinearTile> tiles;
    for (const cuda::FlatTile& tile : cuda::kFlatTiles) {
        for (int32_t x_rows : cuda::kFlatXRows)
            if (x_rows <= tile.max_x_rows)
                tiles.push_back({Sm90LinearKernel::flat, tile.w_rows, x_rows, 1, 1});
    }
    for (const cuda::WideTile& tile : cuda::kWideTiles) {
        for (int32_t x_rows : cuda::kWideXRows)
            if (x_rows <= tile.max_x_rows)
                tiles.push_back({Sm90LinearKernel::wide, tile.w_rows, x_rows, 1, 1});
    }
    return tiles;
}

INSTANTIATE_TEST_SUITE_P(Tiles, CudaLinearTileTest, ::testing::ValuesIn(all_tiles()), [](const auto& info) {
    const Sm90LinearTile& tile = info.param;
    return std::string(tile.kernel == Sm90LinearKernel::flat ? "Flat" : "Wide") +
           std::to_string(tile.w_rows) + "x" + std::to_string(tile.x_rows);
});

std::vector<Sm90LinearTile> tiles_with_norm() {
    std::vector<Sm90LinearTile> tiles;
    for (const Sm90LinearTile& tile : all_tiles())
        if (has_norm(tile)) tiles.push_back(tile);
    return tiles;
}

INSTANTIATE_TEST_SUITE_P(Tiles, CudaLinearNormTest, ::testing::ValuesIn(tiles_with_norm()),
                         [](const auto& info) {
                             return std::to_string(info.param.w_rows) + "x" +
                                    std::to_string(info.param.x_rows);
                         });

// One kernel does both, unless the plan names one that cannot: then rms_norm comes first.
TEST(CudaLinear, NormalisesAsExactlyAsInTwoSteps) {
    if (!is_hopper()) GTEST_SKIP() << "needs sm_90a";
    Random random(3);
    for (int64_t rows : {1, 5, 16}) {
        Product product(random, DType::bfloat16, rows, 96, 4096, 0, 0, false, false, Norm::like_x);
        LinearArgs args = product.args(kOnGpu);
        ASSERT_TRUE(cuda::normalises(cuda::plan_linear(check_linear(args), *cuda::find_gpu("h100"))));
        linear(args);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const double at_once = product.error();
        args.plan = {LinearKernel::sm90_wide, DType::bfloat16, 64, 16, 1, 1};
        ASSERT_FALSE(cuda::normalises(cuda::plan_linear(check_linear(args), *cuda::find_gpu("h100"))));
        linear(args);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        EXPECT_LE(at_once, 1.2 * product.error()) << rows << " rows";
        EXPECT_GT(at_once, 0.0);
    }
}

TEST(CudaLinear, BitsOfARowDoNotDependOnTheOthers) {
    Random random(1);
    for (int64_t width : {40, 576, 1280}) {
        Product product(random, DType::bfloat16, 150, width, 1000, 0, 1, true, true);
        LinearArgs args = product.args(kOnGpu);
        args.batch_invariant = true;
        linear(args);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const std::vector<uint16_t> together = product.result();
        for (int64_t count : {1, 7, 8, 9, 16, 33, 64, 65, 128}) {
            for (TensorView* view : {&args.x, &args.out, &*args.residual}) view->shape[0] = count;
            linear(args);
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            ASSERT_EQ(product.result(), together) << count << " of 150 rows, width " << width;
        }
    }
}

// The kernel in front lets the next one start early, and writes what that takes for weights at its end.
TEST(CudaLinear, ReadsWeightsAfterTheKernelInFront) {
    Random random(2);
    Product first(random, DType::bfloat16, 64, 1024, 4096, 0, 0, false, false);
    Product second(random, DType::bfloat16, 4, 64, 1024, 0, 0, false, false);
    const LinearArgs writer = first.args(kOnGpu);
    LinearArgs reader = second.args(kOnGpu);
    reader.w = writer.out;
    linear(writer);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    linear(reader);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<uint16_t> expected = second.result();
    for (int i = 0; i < 200; ++i) {
        ASSERT_EQ(cudaMemsetAsync(writer.out.data, 0xff, 64 * 1024 * sizeof(uint16_t), nullptr), cudaSuccess);
        linear(writer);
        linear(reader);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        ASSERT_EQ(second.result(), expected) << "launch " << i;
    }
}

TEST(CudaLinear, RefusesWhatItHasNoKernelFor) {
    LinearArgs args;
    args.x = TensorView(reinterpret_cast<void*>(uintptr_t{1} << 20), DType::float32, {2, 8}, kGpu);
    args.w = TensorView(reinterpret_cast<void*>(uintptr_t{1} << 21), DType::float32, {4, 8}, kGpu);
    args.out = TensorView(reinterpret_cast<void*>(uintptr_t{1} << 22), DType::float32, {2, 4}, kGpu);
    EXPECT_THROW(linear(args), TypeError);
}

}  // namespace
}  // namespace octavo
