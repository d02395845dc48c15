// Writes each sequence's newest tokens to the end of its pages.
// grid: one warp a token, all its KV heads, K and V together.
#include "common/fast_divide.h"
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

// One warp moves K and V of a token, all heads, in pieces of which `per_head` make a row.
template <class Piece, class T, class Convert>
__device__ __forceinline__ void move_token(const AppendKvParams& p, T* k_to, const T* k_from, T* v_to,
                                           const T* v_from, const FastDivide& per_head, Convert convert) {
    const int32_t pieces = static_cast<int32_t>(per_head.divisor);
#pragma unroll 4
    for (int32_t i = threadIdx.x % 32; i < p.num_kv_heads * pieces; i += 32) {
        const int64_t head = per_head.quotient(i);
        const int64_t column = (i - head * pieces) * static_cast<int64_t>(sizeof(Piece) / sizeof(T));
        const Piece k = __ldg(reinterpret_cast<const Piece*>(k_from + head * p.k_head_stride + column));
        const Piece v = __ldg(reinterpret_cast<const Piece*>(v_from + head * p.v_head_stride + column));
        *reinterpret_cast<Piece*>(k_to + head * p.k_pages_head_stride + column) = convert(k, p.k_scale);
        *reinterpret_cast<Piece*>(v_to + head * p.v_pages_head_stride + column) = convert(v, p.v_scale);
    }
}

template <class T>
__global__ void append_kv_kernel(const __grid_constant__ AppendKvParams p, FastDivide page_size,
                                 FastDivide pieces_per_head, bool in_chunks) {
    const int64_t token = warp_row();
    if (token >= p.total) return;
    int32_t b = static_cast<int32_t>(token), from_end = 1;  // 1: the last token of the sequence
    if (p.cu_seqlens) {
        if (token >= p.cu_seqlens[p.batch]) return;
        b = find_sequence(p.cu_seqlens, p.batch, token);
        from_end = p.cu_seqlens[b + 1] - static_cast<int32_t>(token);
    }
    const int32_t position = p.seq_lens[b] - from_end;
    if (position < 0) return;  // padding
    const int32_t page_index = page_size.quotient(position);
    const int64_t page = p.page_table[b * p.page_table_stride + page_index];
    const int64_t slot = position - page_index * p.page_size;
    const T* const k_from = static_cast<const T*>(p.k) + token * p.k_token_stride;
    const T* const v_from = static_cast<const T*>(p.v) + token * p.v_token_stride;
    T* const k_to = static_cast<T*>(p.k_pages) + page * p.k_page_stride + slot * p.k_slot_stride;
    T* const v_to = static_cast<T*>(p.v_pages) + page * p.v_page_stride + slot * p.v_slot_stride;
    if (in_chunks) {
        move_token<uint4>(p, k_to, k_from, v_to, v_from, pieces_per_head, [](uint4 x, float) { return x; });
    } else {
        move_token<T>(p, k_to, k_from, v_to, v_from, pieces_per_head, [](T x, float scale) {
            return scale == 1.0f ? x : from_float<T>(to_float(x) / scale);
        });
    }
}

}  // namespace

void append_kv(const AppendKvParams& p, void* stream) {
    if (p.total == 0 || p.num_kv_heads == 0) return;
    const DeviceGuard guard(p.device.index);
    const int32_t per_chunk = static_cast<int32_t>(16 / size_of(p.dtype));
    const bool in_chunks =
        p.head_dim % per_chunk == 0 && p.k_scale == 1.0f && p.v_scale == 1.0f &&
        aligned(p.k, 16, {p.k_token_stride, p.k_head_stride}, p.dtype) &&
        aligned(p.k_pages, 16, {p.k_page_stride, p.k_slot_stride, p.k_pages_head_stride}, p.dtype) &&
        aligned(p.v, 16, {p.v_token_stride, p.v_head_stride}, p.dtype) &&
        aligned(p.v_pages, 16, {p.v_page_stride, p.v_slot_stride, p.v_pages_head_stride}, p.dtype);
    const FastDivide pieces_per_head = FastDivide::by(in_chunks ? p.head_dim / per_chunk : p.head_dim);
    with_type(p.dtype, [&](auto type) {
        append_kv_kernel<decltype(type)>
            <<<blocks_for_rows(p.total), 32 * kRowsPerBlock, 0, static_cast<cudaStream_t>(stream)>>>(
                p, FastDivide::by(p.page_size), pieces_per_head, in_chunks);
    });
    check(cudaGetLastError(), "append_kv");
}

}  // namespace octavo::cuda
