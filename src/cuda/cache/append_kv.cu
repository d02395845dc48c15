// Writes each sequence's newest tokens to the end of its pages.
// grid: one warp a (token, KV head), K and V together.
#include "cuda/alignment.h"
#include "cuda/backend.h"
#include "cuda/rows.cuh"
#include "cuda/runtime.h"

namespace octavo::cuda {
namespace {

// The sequence that packed token `token` belongs to: the last one that starts at or before it.
__device__ __forceinline__ int32_t find_sequence(const int32_t* cu_seqlens, int32_t batch, int64_t token) {
    int32_t low = 0, high = batch;  // cu_seqlens[low] <= token < cu_seqlens[high]
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        (cu_seqlens[middle] <= token ? low : high) = middle;
    }
    return low;
}

template <class T>
__device__ __forceinline__ void store_row(T* to, const T* from, int32_t head_dim, bool aligned, float scale) {
    if (scale == 1.0f) return copy_row(to, from, head_dim, aligned);
    for (int i = threadIdx.x % 32; i < head_dim; i += 32) to[i] = from_float<T>(to_float(from[i]) / scale);
}

template <class T>
__global__ void append_kv_kernel(const __grid_constant__ AppendKvParams p, bool k_aligned, bool v_aligned) {
    const int64_t row = warp_row();
    const int64_t token = row / p.num_kv_heads, head = row % p.num_kv_heads;
    if (token >= p.total) return;
    int32_t b = static_cast<int32_t>(token), from_end = 1;  // 1: the last token of the sequence
    if (p.cu_seqlens) {
        if (token >= p.cu_seqlens[p.batch]) return;
        b = find_sequence(p.cu_seqlens, p.batch, token);
        from_end = p.cu_seqlens[b + 1] - static_cast<int32_t>(token);
    }
    const int32_t position = p.seq_lens[b] - from_end;
    if (position < 0) return;  // padding
    const int64_t page = p.page_table[b * p.page_table_stride + position / p.page_size];
    const int64_t slot = position % p.page_size;
    store_row(static_cast<T*>(p.k_pages) + page * p.k_page_stride + slot * p.k_slot_stride +
                  head * p.k_pages_head_stride,
              static_cast<const T*>(p.k) + token * p.k_token_stride + head * p.k_head_stride, p.head_dim,
              k_aligned, p.k_scale);
    store_row(static_cast<T*>(p.v_pages) + page * p.v_page_stride + slot * p.v_slot_stride +
                  head * p.v_pages_head_stride,
              static_cast<const T*>(p.v) + token * p.v_token_stride + head * p.v_head_stride, p.head_dim,
              v_aligned, p.v_scale);
}

}  // namespace

void append_kv(const AppendKvParams& p, void* stream) {
    const int64_t rows = p.total * p.num_kv_heads;
    if (rows == 0) return;
    const DeviceGuard guard(p.device.index);
    const bool whole = p.head_dim * size_of(p.dtype) % 16 == 0;
    const bool k_aligned =
        whole && aligned(p.k, 16, {p.k_token_stride, p.k_head_stride}, p.dtype) &&
        aligned(p.k_pages, 16, {p.k_page_stride, p.k_slot_stride, p.k_pages_head_stride}, p.dtype);
    const bool v_aligned =
        whole && aligned(p.v, 16, {p.v_token_stride, p.v_head_stride}, p.dtype) &&
        aligned(p.v_pages, 16, {p.v_page_stride, p.v_slot_stride, p.v_pages_head_stride}, p.dtype);
    with_type(p.dtype, [&](auto type) {
        append_kv_kernel<decltype(type)>
            <<<blocks_for_rows(rows), 32 * kRowsPerBlock, 0, static_cast<cudaStream_t>(stream)>>>(
                p, k_aligned, v_aligned);
    });
    check(cudaGetLastError(), "append_kv");
}

}  // namespace octavo::cuda
