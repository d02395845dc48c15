// Cascade inference: all queries over the shared prefix, each sequence's behind it, and the merge of both.
#include "cuda/shared_prefix/shared_prefix.h"

#include "common/score.h"
#include "cuda/alignment.h"
#include "cuda/backend.h"
#include "cuda/decode/decode.h"
#include "cuda/rows.cuh"
#include "cuda/runtime.h"
#include "cuda/types.h"
#include "cuda/warp.cuh"
#include "cuda/workspace.h"
#include "params/shared_prefix.h"

#include <algorithm>

namespace octavo::cuda {
namespace {

// kWide neighbours, loaded or stored at once.
template <class T, int kWide>
struct alignas(kWide * sizeof(T)) Columns {
    T at[kWide];
};

constexpr int kMaxRuns = 32;  // of the prefix: a lane each

// Merges what the runs of the prefix give, [num_runs, rows, head_dim] and [num_runs, rows], into the results
// behind it, p's out and lse.
// grid: one warp a row of [total_q, num_q_heads].
template <class T, int kWide>
__global__ void combine_prefix_kernel(const __grid_constant__ AttentionParams p, const T* prefix_out,
                                      const float* prefix_lse, int32_t num_runs) {
    const int lane = threadIdx.x % 32;
    const int64_t row = warp_row(), num_rows = p.total_q * p.num_q_heads;
    const int64_t token = row / p.num_q_heads, head = row - token * p.num_q_heads;
    if (row >= num_rows || (p.cu_seqlens_q && token >= p.cu_seqlens_q[p.batch])) return;

    float* const lse = p.lse + token * p.lse_token_stride + head * p.lse_head_stride;
    const float rest_lse_log2 = *lse * kLog2e;
    if (rest_lse_log2 == -INFINITY) return;  // padding
    const float lse_log2 = lane < num_runs ? prefix_lse[lane * num_rows + row] * kLog2e : -INFINITY;
    const float max = warp_max(fmaxf(rest_lse_log2, lse_log2));
    float rest_weight = exp2f(rest_lse_log2 - max), weight = exp2f(lse_log2 - max);
    const float sum = warp_sum(weight) + rest_weight;
    rest_weight /= sum;
    weight /= sum;

    using Wide = Columns<T, kWide>;
    auto* const out = reinterpret_cast<Wide*>(static_cast<T*>(p.out) + token * p.out_token_stride +
                                              head * p.out_head_stride);
    for (int32_t first = 0; first < p.head_dim; first += 32 * kWide) {  // the warp stays together
        const int32_t column = first + kWide * lane;
        const int32_t at = column < p.head_dim ? column / kWide : 0;
        Wide result = out[at];
        float merged[kWide];
#pragma unroll
        for (int j = 0; j < kWide; ++j) merged[j] = rest_weight * to_float(result.at[j]);
#pragma unroll 4
        for (int32_t run = 0; run < num_runs; ++run) {
            const float run_weight = __shfl_sync(~0u, weight, run);
            const Wide from =
                reinterpret_cast<const Wide*>(prefix_out + (run * num_rows + row) * p.head_dim)[at];
#pragma unroll
            for (int j = 0; j < kWide; ++j) merged[j] += run_weight * to_float(from.at[j]);
        }
#pragma unroll
        for (int j = 0; j < kWide; ++j) result.at[j] = from_float<T>(merged[j]);
        if (column < p.head_dim) out[at] = result;
    }
    if (lane == 0) *lse = (max + log2f(sum)) * kLn2;
}

template <class T>
void combine_prefix(const AttentionParams& p, const AttentionParams& prefix, cudaStream_t stream) {
    constexpr int kWide = 4;
    const bool wide = aligned(p.out, kWide * sizeof(T), {p.out_token_stride, p.out_head_stride}, p.dtype);
    const auto kernel = wide ? combine_prefix_kernel<T, kWide> : combine_prefix_kernel<T, 1>;
    kernel<<<blocks_for_rows(p.total_q * p.num_q_heads), 32 * kRowsPerBlock, 0, stream>>>(
        p, static_cast<const T*>(prefix.out), prefix.lse, prefix.batch);
    check(cudaGetLastError(), p.op);
}

// The keys of one run, whole pages: as many runs as give the SMs a tile of rows each, of some length.
int32_t choose_run_len(const AttentionParams& p) {
    constexpr int64_t kTileRows = 128, kMinKeys = 256;
    const int64_t tiles = (p.total_q * p.group_size() + kTileRows - 1) / kTileRows * p.num_kv_heads;
    const int64_t runs = std::clamp<int64_t>(
        std::min(num_sms(p.device.index) / tiles, p.shared_prefix_len / kMinKeys), 1, int64_t{kMaxRuns});
    const int64_t num_pages = p.shared_prefix_len / p.page_size;
    return static_cast<int32_t>((num_pages + runs - 1) / runs * p.page_size);
}

}  // namespace

void shared_prefix_attention(const AttentionParams& p, cudaStream_t stream) {
    const bool by_decode = decode_serves(over_shared_prefix(p, p.shared_prefix_len, nullptr, nullptr));
    const int32_t run_len = by_decode ? p.shared_prefix_len : choose_run_len(p);  // decode cuts keys itself
    const int64_t num_runs = (p.shared_prefix_len + run_len - 1) / run_len, rows = p.total_q * p.num_q_heads;
    const size_t out_bytes = num_runs * rows * p.head_dim * size_of(p.dtype);
    const size_t lse_bytes = (num_runs + 1) * rows * sizeof(float);
    const Workspace workspace(p.device.index, out_bytes + lse_bytes, stream, WorkspaceUser::shared_prefix);
    float* const lse = workspace.floats() + out_bytes / sizeof(float);
    const AttentionParams prefix = over_shared_prefix(p, run_len, workspace.floats(), lse);
    const AttentionParams rest = after_shared_prefix(p, lse + num_runs * rows);
    attention(prefix, stream);  // first: `out` may be q
    attention(rest, stream);
    (p.dtype == DType::float16 ? combine_prefix<float16> : combine_prefix<bfloat16>)(rest, prefix, stream);
}

}  // namespace octavo::cuda
