// Normalises rows by their root mean square.
//
// grid: one CTA per row, or one CTA per kRowsPerBlock rows with one warp for each.
#include "common/print_kernels.h"
#include "cuda/backend.h"
#include "cuda/columns.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/rms_norm/plan.h"
#include "cuda/rows.cuh"
#include "cuda/types.h"
#include "cuda/warp.cuh"

namespace octavo::cuda {
namespace {

// Returns the sum over a CTA. All of its threads call it together, and no more than once.
__device__ __forceinline__ float cta_sum(float x) {
    __shared__ float of_warps[kRmsNormMaxThreads / 32];
    const int lane = threadIdx.x % 32;
    x = warp_sum(x);
    if (lane == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / 32 ? of_warps[lane] : 0.0f);
}

// One thread's part of a row: every `stride`th piece of kWide numbers.
template <class T, class Weight, int kWide>
struct RowPart {
    using Piece = Columns<T, kWide>;
    using WeightPiece = Columns<Weight, kWide>;

    const Piece *x, *residual;  // residual is null if the call has none
    const WeightPiece* weight;
    Piece *out, *sum;  // sum is where x + residual goes

    // Loads the numbers that are to be normalised.
    __device__ __forceinline__ Piece load(int32_t i) const {
        Piece numbers = x[i];
        if (residual) {
            const Piece added = residual[i];
#pragma unroll
            for (int c = 0; c < kWide; ++c)
                numbers.at[c] = from_float<T>(to_float(numbers.at[c]) + to_float(added.at[c]));
        }
        return numbers;
    }

    // Stores the numbers if they are sums, and returns their sum of squares.
    __device__ __forceinline__ float keep(const Piece& numbers, int32_t i) const {
        if (residual) sum[i] = numbers;
        float squares = 0.0f;
#pragma unroll
        for (int c = 0; c < kWide; ++c) squares += to_float(numbers.at[c]) * to_float(numbers.at[c]);
        return squares;
    }

    __device__ __forceinline__ void normalise(Piece numbers, const WeightPiece& weights, int32_t i,
                                              float factor) const {
#pragma unroll
        for (int c = 0; c < kWide; ++c)
            numbers.at[c] = from_float<T>(to_float(numbers.at[c]) * factor * to_float(weights.at[c]));
        out[i] = numbers;
    }
};

template <class T, class Weight, int kWide>
__global__ void __launch_bounds__(kRmsNormMaxThreads)
    rms_norm_kernel(const __grid_constant__ RmsNormParams p, bool is_warp_each) {
    constexpr int kHeld = kRmsNormHeld / kWide, kHeldWeights = kWide == 1 ? 8 : 1;  // more would spill
    using Part = RowPart<T, Weight, kWide>;
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const int64_t row = is_warp_each ? warp_row() : blockIdx.x;
    if (row >= p.num_rows()) return;
    const auto first = static_cast<int32_t>(is_warp_each ? threadIdx.x % 32 : threadIdx.x);
    const auto stride = static_cast<int32_t>(is_warp_each ? 32 : blockDim.x);
    const int32_t pieces = p.dim / kWide;

    int64_t index[3] = {0, 0, row};
    if (p.shape[0] * p.shape[1] != 1) {
        index[2] = row % p.shape[2];
        index[1] = row / p.shape[2] % p.shape[1];
        index[0] = row / p.shape[2] / p.shape[1];
    }
    auto offset = [&](const int64_t (&strides)[3]) {
        return index[0] * strides[0] + index[1] * strides[1] + index[2] * strides[2];
    };
    auto pieces_of = [&](const void* rows, const int64_t (&strides)[3]) {
        return reinterpret_cast<const typename Part::Piece*>(static_cast<const T*>(rows) + offset(strides));
    };
    Part part;
    part.x = pieces_of(p.x, p.x_strides);
    part.residual = p.residual ? pieces_of(p.residual, p.residual_strides) : nullptr;
    part.weight = static_cast<const typename Part::WeightPiece*>(p.weight);
    part.out = const_cast<typename Part::Piece*>(pieces_of(p.out, p.out_strides));
    part.sum = const_cast<typename Part::Piece*>(pieces_of(p.residual_out, p.residual_out_strides));

    typename Part::Piece numbers[kHeld];
    typename Part::WeightPiece weights[kHeldWeights];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {  // all loads come before the first store
        const int32_t i = first + j * stride;
        if (i >= pieces) break;
        numbers[j] = part.load(i);
        if (j < kHeldWeights) weights[j] = part.weight[i];
    }
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
        const int32_t i = first + j * stride;
        if (i >= pieces) break;
        squares += part.keep(numbers[j], i);
    }
#pragma unroll 1
    for (int32_t i = first + kHeld * stride; i < pieces; i += stride) squares += part.keep(part.load(i), i);

    squares = is_warp_each ? warp_sum(squares) : cta_sum(squares);
    const float factor = rsqrtf(squares / static_cast<float>(p.dim) + p.eps);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
        const int32_t i = first + j * stride;
        if (i >= pieces) break;
        part.normalise(numbers[j], j < kHeldWeights ? weights[j] : part.weight[i], i, factor);
    }
#pragma unroll 1
    for (int32_t i = first + kHeld * stride; i < pieces; i += stride)
        part.normalise(part.residual ? part.sum[i] : part.x[i], part.weight[i], i, factor);
}

}  // namespace

void rms_norm(const RmsNormParams& p, void* stream) {
    const RmsNormPlan plan = plan_rms_norm(p);
    if (plan.num_rows == 0) return;
    if (prints_kernels()) print_kernel(describe(plan));
    const DeviceGuard guard(p.device.index);
    const LaunchShape shape{dim3(static_cast<unsigned>(plan.num_ctas())), plan.threads(), true};
    auto run = [&](auto type, auto weight_type) {
        using T = decltype(type);
        using Weight = decltype(weight_type);
        auto launch_wide = [&](auto wide) {
            launch<rms_norm_kernel<T, Weight, decltype(wide)::value>>(
                "rms_norm", p.device.index, static_cast<cudaStream_t>(stream), shape, p, plan.is_warp_each());
        };
        if (plan.in_chunks) return launch_wide(std::integral_constant<int, 16 / sizeof(T)>{});
        launch_wide(std::integral_constant<int, 1>{});
    };
    with_type(p.dtype, [&](auto type) {
        if (p.weight_dtype == p.dtype) return run(type, type);
        run(type, float32{});
    });
}

}  // namespace octavo::cuda
