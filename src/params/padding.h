// Rows of packed arrays that belong to no sequence: those from cu_seqlens[batch] on.
#pragma once

#include "params/attention_backward_params.h"
#include "params/index_array.h"

#include <cstdint>

namespace octavo {

// One array, [total, num_heads, head_bytes], whose rows of padding are to be filled with copies of `word`.
// Strides count bytes; a head's bytes have no gaps.
struct PaddedArray {
    void* data;
    int64_t token_stride, head_stride;
    int64_t total;
    int32_t num_heads, head_bytes;
    uint32_t word;
    IndexArray cu_seqlens;  // [batch + 1]
    int32_t batch;
};

struct Padding {
    PaddedArray arrays[3];
    int32_t count = 0;

    void add(const PaddedArray& array) {
        if (array.total > 0) arrays[count++] = array;
    }
};

// The gradients of such rows have to become zero, whatever the arrays held.
inline Padding padding_of(const AttentionBackwardParams& p) {
    Padding padding;
    if (!p.cu_seqlens_q) return padding;
    const int64_t size = size_of(p.dtype);
    auto add = [&](void* data, const GradientStrides& strides, int64_t total, int32_t num_heads,
                   int32_t head_dim, const IndexArray& cu_seqlens) {
        padding.add({data, strides.token * size, strides.head * size, total, num_heads,
                     static_cast<int32_t>(head_dim * size), 0, cu_seqlens, p.batch});
    };
    add(p.dq, p.dq_strides, p.total_q, p.num_q_heads, p.head_dim, p.cu_seqlens_q);
    add(p.dk, p.dk_strides, p.total_k, p.num_kv_heads, p.head_dim, p.cu_seqlens_k);
    add(p.dv, p.dv_strides, p.total_k, p.num_kv_heads, p.head_dim_v, p.cu_seqlens_k);
    return padding;
}

}  // namespace octavo
