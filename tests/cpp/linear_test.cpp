// linear() through the public C++ header, on the CPU, in float32. The Python tests cover the rest.
#include "checks/checks.h"
#include "cuda/gpu.h"
#include "cuda/linear/output.h"
#include "cuda/linear/plan.h"
#include "cuda/linear/table.h"
#include "host_arrays.h"

#include <octavo/build_info.h>
#include <octavo/explain.h>
#include <octavo/linear.h>

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <tuple>
#include <vector>

namespace octavo {
namespace {

// A call over memory of its own: x [rows, depth], w [w_rows, depth], out [rows, width].
struct Layer {
    Floats x, w, out;
    LinearArgs args;

    Layer(int64_t rows, int64_t w_rows, int64_t depth, int64_t width) {
        std::mt19937 random(1);
        x = random_floats(random, rows * depth);
        w = random_floats(random, w_rows * depth);
        out.assign(static_cast<size_t>(rows * width), NAN);
        args.x = TensorView(x.data(), DType::float32, {rows, depth});
        args.w = TensorView(w.data(), DType::float32, {w_rows, depth});
        args.out = TensorView(out.data(), DType::float32, {rows, width});
    }

    double sum(int64_t row, int64_t w_row) const {
        const int64_t depth = args.x.shape[1];
        double sum = 0;
        for (int64_t k = 0; k < depth; ++k)
            sum +=
                double{x[static_cast<size_t>(row * depth + k)]} * w[static_cast<size_t>(w_row * depth + k)];
        return sum;
    }
};

TEST(Linear, BiasGateAndResidual) {
    constexpr int64_t kRows = 3, kWidth = 5, kDepth = 70;
    Layer layer(kRows, 2 * kWidth, kDepth, kWidth);
    std::mt19937 random(2);
    Floats bias = random_floats(random, 2 * kWidth), residual = random_floats(random, kRows * kWidth);
    layer.args.bias = TensorView(bias.data(), DType::float32, {2 * kWidth});
    layer.args.residual = TensorView(residual.data(), DType::float32, {kRows, kWidth});
    layer.args.activation = Activation::silu_gate;
    linear(layer.args);
    for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t column = 0; column < kWidth; ++column) {
            const auto at = static_cast<size_t>(row * kWidth + column), c = static_cast<size_t>(column);
            const double gate = layer.sum(row, column) + bias[c];
            const double up = layer.sum(row, kWidth + column) + bias[kWidth + c];
            const double expected = gate / (1 + std::exp(-gate)) * up + residual[at];
            ASSERT_NEAR(layer.out[at], expected, 1e-5 * (1 + std::abs(gate * up)));
        }
    }
}

TEST(Linear, BitsDoNotDependOnThreadsOrRows) {
    constexpr int64_t kRows = 70, kWidth = 45, kDepth = 1500;
    const int threads = get_num_threads();
    Layer layer(kRows, kWidth, kDepth, kWidth);
    set_num_threads(1);
    linear(layer.args);
    const Floats alone = layer.out;
    for (int count : {2, 5}) {
        layer.out.assign(layer.out.size(), NAN);
        set_num_threads(count);
        linear(layer.args);
        EXPECT_EQ(layer.out, alone);
    }
    set_num_threads(threads);
    layer.out.assign(layer.out.size(), NAN);
    layer.args.x.shape[0] = layer.args.out.shape[0] = 1;
    linear(layer.args);
    EXPECT_EQ(Floats(layer.out.begin(), layer.out.begin() + kWidth),
              Floats(alone.begin(), alone.begin() + kWidth));
    EXPECT_TRUE(std::isnan(layer.out[kWidth]));
}

TEST(Linear, Refusals) {
    Layer layer(2, 3, 4, 3);
    LinearArgs args = layer.args;
    args.activation = Activation::silu_gate;
    EXPECT_THROW(linear(args), ValueError);
    args = layer.args;
    args.activation = static_cast<Activation>(7);
    EXPECT_THROW(linear(args), ValueError);
    args = layer.args;
    args.w.dtype = DType::int32;
    EXPECT_THROW(linear(args), TypeError);
    args = layer.args;
    for (TensorView* array : {&args.x, &args.w, &args.out}) array->device = {DeviceType::cuda, 0};
    EXPECT_THROW(linear(args), TypeError);  // no kernel for float32
    args.batch_invariant = true;
    EXPECT_THROW(linear(args), TypeError);
    EXPECT_EQ(explain(layer.args, "h100").kernel, "matmul of the arrays' library<float32>");
    EXPECT_EQ(explain(layer.args).file, "src/cpu/linear.cpp");
}

// Half-precision arrays that are nowhere, of x [8, 4096] and w [4096, 4096].
LinearArgs large_call() {
    LinearArgs args;
    args.x = TensorView(nullptr, DType::bfloat16, {8, 4096});
    args.w = TensorView(nullptr, DType::bfloat16, {4096, 4096});
    args.out = args.x;
    for (TensorView* array : {&args.x, &args.w, &args.out}) array->device = {DeviceType::meta, 0};
    return args;
}

TEST(LinearPlan, OfTheTableAndOfTheCall) {
    const LinearPlan plan = linear_plan(8, 4096, 4096, DType::bfloat16, "h100");
    EXPECT_EQ(plan.source, LinearPlanSource::measured);
    LinearArgs args = large_call();
    EXPECT_EQ(explain(args, "h100").kernel, "sm90_flat<bfloat16, 16x8>");
    args.plan = LinearPlan{LinearKernel::sm90_wide, DType::bfloat16, 96, 16, 2, 1};
    EXPECT_NE(*args.plan, plan);
    EXPECT_EQ(explain(args, "h100").kernel, "sm90_wide<bfloat16, 96x16>");
    EXPECT_EQ(args.plan->to_string(), "sm90_wide<bfloat16, 96x16, splits 2, CTAs per SM 1> (estimated)");
    EXPECT_THROW(explain(args, "a100"), ValueError);
    EXPECT_THROW(explain(args, "cpu"), ValueError);
    args.plan->dtype = DType::float16;
    EXPECT_THROW(explain(args, "h100"), ValueError);
}

// Choices are remembered as long as the tables are the same.
TEST(LinearPlan, OfATunedTableAndOfTheOneAfterIt) {
    const cuda::Gpu& gpu = *cuda::find_gpu("h100");
    auto plan = [] { return linear_plan(8, 4096, 4096, DType::bfloat16, "h100"); };
    const LinearPlan shipped = plan();
    for (int32_t w_rows : {64, 96}) {
        cuda::set_tuned_rows(gpu, DType::bfloat16,
                             {{4096, 4096, 16, LinearKernel::sm90_wide, w_rows, 2, 1, false}});
        EXPECT_EQ(plan().source, LinearPlanSource::tuned);
        EXPECT_EQ(plan().w_rows, w_rows);
    }
    cuda::set_tuned_rows(gpu, DType::bfloat16, {});
    EXPECT_EQ(plan(), shipped);
    EXPECT_EQ(plan().source, LinearPlanSource::measured);
}

// Two neighbours move at once where rows begin on 4 bytes, and of a gate's bias the second half, too.
TEST(LinearPlan, ResultsInPairs) {
    auto in_pairs = [](LinearArgs args) {
        uintptr_t address = 0;
        for (TensorView* array : {&args.x, &args.w, &args.out, args.bias ? &*args.bias : nullptr,
                                  args.residual ? &*args.residual : nullptr}) {
            if (array) array->data = reinterpret_cast<char*>(address += uintptr_t{1} << 40);
        }
        return cuda::output_of(check_linear(args)).in_pairs;
    };
    const LinearArgs call = large_call();
    EXPECT_TRUE(in_pairs(call));
    LinearArgs args = call;
    args.out.strides[0] = 4097;
    EXPECT_FALSE(in_pairs(args));
    args.out.strides[0] = 4098;
    EXPECT_TRUE(in_pairs(args));
    args.residual = call.out;
    EXPECT_TRUE(in_pairs(args));
    args.residual->strides[0] = 4097;
    EXPECT_FALSE(in_pairs(args));
    for (int64_t width : {4095, 4096}) {
        args = call;
        args.w.shape[0] = 2 * width;
        args.out.shape[1] = width;
        args.bias = TensorView(nullptr, DType::bfloat16, {2 * width});
        args.bias->device = args.x.device;
        args.activation = Activation::silu_gate;
        EXPECT_EQ(in_pairs(args), width % 2 == 0);
    }
}

// Rows that rms_norm leaves in workspace begin on 16 bytes.
TEST(LinearPlan, NormalisedRows) {
    LinearParams p{};
    for (const auto& [dtype, depth, stride] : {std::tuple(DType::bfloat16, 64, 64),
                                               {DType::bfloat16, 65, 72},
                                               {DType::float16, 71, 72},
                                               {DType::float32, 65, 68}}) {
        p.dtype = dtype;
        p.depth = depth;
        EXPECT_EQ(cuda::normalised_stride(p), stride);
    }
}

TEST(LinearPlan, Refusals) {
    EXPECT_THROW(linear_plan(-1, 8, 8, DType::bfloat16, "h100"), ValueError);
    EXPECT_THROW(linear_plan(1, 8, 8, DType::bfloat16, "cpu"), ValueError);
    EXPECT_THROW(linear_plan(1, 7, 8, DType::bfloat16, "h100", Activation::silu_gate), ValueError);
    EXPECT_THROW(linear_plan(1, 8, 8, DType::float32, "h100", {}, true), TypeError);
    LinearArgs args = large_call();  // C++ has no library to hand over to
    uintptr_t address = 0;
    for (TensorView* array : {&args.x, &args.w, &args.out}) {
        array->data = reinterpret_cast<void*>(address += uintptr_t{1} << 40);
        array->device = {DeviceType::cuda, 0};
    }
    args.plan = LinearPlan{};
    EXPECT_THROW(linear(args), ValueError);
}

}  // namespace
}  // namespace octavo
