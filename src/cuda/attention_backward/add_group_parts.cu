// Adds up dK and dV of the parts of a group's query heads.
//
// grid: x runs over pieces of 16 bytes, y is 0 for dK and 1 for dV.
#include "cuda/attention_backward/run.h"
#include "cuda/launch.cuh"
#include "cuda/plan.h"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/types.h"

#include <algorithm>

namespace octavo::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 8;  // numbers of 16 bits

// dK or dV: where it goes, and where its parts are.
struct PartialGradient {
    void* to;
    const void* from;
    GradientStrides to_strides, from_strides;
    int32_t columns;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    add_group_parts_kernel(const PartialGradient dk, const PartialGradient dv, int32_t tokens,
                           int32_t sequences, int32_t heads, int32_t parts) {
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const PartialGradient& gradient = blockIdx.y == 0 ? dk : dv;
    const int32_t pieces = gradient.columns / kPiece;
    const int64_t end = int64_t{sequences} * tokens * heads * pieces;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < end;
         i += int64_t{gridDim.x} * kThreads) {
        const auto column = static_cast<int32_t>(i % pieces) * kPiece;
        const int64_t row = i / pieces;
        const auto head = static_cast<int32_t>(row % heads);
        const int64_t place = row / heads, sequence = place / tokens, token = place - sequence * tokens;
        const T* const from = static_cast<const T*>(gradient.from) + sequence * gradient.from_strides.batch +
                              token * gradient.from_strides.token +
                              int64_t{head} * parts * gradient.from_strides.head + column;
        float sums[kPiece] = {};
        for (int32_t part = 0; part < parts; ++part) {
            const uint4 piece = *reinterpret_cast<const uint4*>(from + part * gradient.from_strides.head);
            const uint32_t pairs[kPiece / 2] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
            for (int j = 0; j < kPiece / 2; ++j) {
                const float2 pair = unpack<T>(pairs[j]);
                sums[2 * j] += pair.x;
                sums[2 * j + 1] += pair.y;
            }
        }
        T* const to = static_cast<T*>(gradient.to) + sequence * gradient.to_strides.batch +
                      token * gradient.to_strides.token + head * gradient.to_strides.head + column;
        *reinterpret_cast<uint4*>(to) = make_uint4(pack<T>(sums[0], sums[1]), pack<T>(sums[2], sums[3]),
                                                   pack<T>(sums[4], sums[5]), pack<T>(sums[6], sums[7]));
    }
}

}  // namespace

void launch_add_group_parts(const AttentionBackwardParams& p, const AttentionBackwardParams& divided,
                            cudaStream_t stream) {
    const PartialGradient dk{p.dk, divided.dk, p.dk_strides, divided.dk_strides, p.head_dim};
    const PartialGradient dv{p.dv, divided.dv, p.dv_strides, divided.dv_strides, p.head_dim_v};
    const bool packed{p.cu_seqlens_k};
    const auto tokens = static_cast<int32_t>(packed ? p.total_k : p.seqlen_k);
    const int32_t sequences = packed ? 1 : p.batch;
    const int64_t pieces =
        int64_t{sequences} * tokens * p.num_kv_heads * (std::max(p.head_dim, p.head_dim_v) / kPiece);
    constexpr int64_t kMostBlocks = 1 << 20;  // more work goes round
    const LaunchShape shape{
        dim3(static_cast<unsigned>(std::clamp<int64_t>(ceil_divide(pieces, kThreads), 1, kMostBlocks)), 2),
        kThreads, true};
    const int32_t parts = divided.num_kv_heads / p.num_kv_heads;
    if (p.dtype == DType::float16) {
        launch<add_group_parts_kernel<float16>>(p.op, p.device.index, stream, shape, dk, dv, tokens,
                                                sequences, p.num_kv_heads, parts);
    } else {
        launch<add_group_parts_kernel<bfloat16>>(p.op, p.device.index, stream, shape, dk, dv, tokens,
                                                 sequences, p.num_kv_heads, parts);
    }
}

}  // namespace octavo::cuda
