// A call of latent_attention, checked: plain data for both backends. Strides count elements; the last axis
// has stride 1 throughout.
#pragma once

#include "common/macros.h"
#include "params/index_array.h"

#include <octavo/tensor.h>

#include <cstdint>

namespace octavo {

constexpr int32_t kMaxLatentDim = 1024;

struct LatentAttentionParams {
    DType dtype;     // the dtype of q and out
    DType kv_dtype;  // the same, or float8_e4m3fn
    Device device;

    const void* q;  // [total_q, num_q_heads, qk_dim]; one token a sequence without cu_seqlens_q
    int64_t q_token_stride, q_head_stride;
    void* out;  // [total_q, num_q_heads, v_dim]
    int64_t out_token_stride, out_head_stride;
    float* lse;  // [total_q, num_q_heads]; may be null
    int64_t lse_token_stride, lse_head_stride;
    const void* kv;  // [num_pages, page_size, qk_dim]
    int64_t kv_page_stride, kv_slot_stride;

    IndexArray cu_seqlens_q;  // [batch + 1]; null: one query a sequence
    IndexArray page_table;    // [batch, max_pages]
    int64_t page_table_stride;
    IndexArray seq_lens;  // [batch]

    int64_t num_pages;
    int64_t total_q;  // queries over all sequences
    int32_t batch;
    int32_t seqlen_q;  // 1; packed: the bound max_seqlen_q
    int32_t seqlen_k;  // max_pages * page_size
    int32_t num_q_heads, qk_dim, v_dim;
    int32_t page_size;
    bool causal;
    float softmax_scale;  // includes kv_scale
    float out_scale;      // is kv_scale
    int32_t num_splits;   // runs of keys for each row; 0: the backend chooses
};

// Where one sequence of the batch lies. Its row r belongs to query r / num_q_heads and to head r %
// num_q_heads.
struct LatentSequence {
    int64_t first_q;  // its first query, a row of q, out and lse
    int32_t seqlen_q, seqlen_k;

    // Not more keys than page_table has room for, and not fewer than none, whatever seq_lens says: numbers of
    // tiles follow from it, by which parts of a kernel wait for each other.
    OCTAVO_HD static LatentSequence make(const LatentAttentionParams& p, int32_t b) {
        const int32_t length = p.seq_lens[b], most = length < p.seqlen_k ? length : p.seqlen_k;
        const int32_t seqlen_k = most > 0 ? most : 0;
        if (!p.cu_seqlens_q) return {b, 1, seqlen_k};
        const int32_t first = p.cu_seqlens_q[b];
        return {first, p.cu_seqlens_q[b + 1] - first, seqlen_k};
    }

    // A query sees the keys below this one.
    OCTAVO_HD int32_t end_key(bool causal, int32_t query) const {
        if (!causal) return seqlen_k;
        const int32_t end = seqlen_k - seqlen_q + query + 1;
        return end > 0 ? end : 0;
    }
};

}  // namespace octavo
