// The operators that write a paged cache, checked: plain data for both backends.
// Strides count elements; the last axis has stride 1 throughout.
#pragma once

#include "params/cache_scales.h"
#include "params/index_array.h"
#include "params/key_transform.h"
#include "params/rotary.h"

#include <octavo/tensor.h>

#include <cstdint>

namespace octavo {

struct AppendKvParams {
    DType dtype;    // the dtype of k and v
    DType k_dtype;  // the dtype of k_pages: the same as dtype, or codes; likewise v_dtype
    DType v_dtype;
    Device device;
    const void* k;  // [total, num_kv_heads, head_dim]
    int64_t k_token_stride, k_head_stride;
    const void* v;  // like k, but head_dim_v long; likewise v_pages
    int64_t v_token_stride, v_head_stride;
    void* k_pages;  // [num_pages, page_size, num_kv_heads, head_dim]
    int64_t k_page_stride, k_slot_stride, k_pages_head_stride;
    void* v_pages;
    int64_t v_page_stride, v_slot_stride, v_pages_head_stride;
    IndexArray page_table;  // [batch, max_pages]; null with slot_mapping
    int64_t page_table_stride;
    int32_t max_pages;
    IndexArray seq_lens;       // [batch], new tokens included
    IndexArray cu_seqlens;     // [batch + 1]; null: one token a sequence
    const void* slot_mapping;  // [total], int64 or int32: page * page_size + slot, negative: none; or null
    bool has_wide_slots;       // whether slot_mapping is of int64
    bool static_tables;        // what earlier kernels may still write: see AppendKvArgs
    int64_t total;             // rows of k and v: the new tokens over all sequences, and padding
    int32_t batch, num_kv_heads, head_dim, head_dim_v, page_size;
    float k_scale, v_scale;                        // what is stored is the value divided by its scale
    CacheScales k_static_scales, v_static_scales;  // the same factors, given in memory
    CacheScales k_scales, v_scales;                // scales that are written, one for each token and KV head
    KeyTransform key_transform;                    // applied to keys before they become codes
    Rotary rotary;                                 // applied to keys before all else, and to queries
    const void* q;                                 // [total, num_q_heads, head_dim]
    int64_t q_token_stride, q_head_stride;
    void* q_out;  // like q: where the rotated queries go
    int64_t q_out_token_stride, q_out_head_stride;
    int32_t num_q_heads;  // 0 without queries

    OCTAVO_HD bool has_rotary() const { return rotary.dim > 0; }
    OCTAVO_HD int64_t mapped_slot(int64_t token) const {
        return has_wide_slots ? static_cast<const int64_t*>(slot_mapping)[token]
                              : static_cast<const int32_t*>(slot_mapping)[token];
    }
};

struct CopyPagesParams {
    struct Pages {
        void* data;  // [num_pages, page_size, num_kv_heads, head_dim], as the device that copies addresses it
        int64_t page_stride, slot_stride, head_stride;
    };
    DType dtype;    // the dtype of k_pages; that of v_pages has as many bytes
    Device device;  // the device that copies
    Pages from_k, from_v, to_k, to_v;
    CacheScales from_k_scales, from_v_scales, to_k_scales, to_v_scales;  // as the device addresses them
    IndexArray copies;                                                   // [num_copies, 2]: (from, to)
    int64_t copies_stride;
    int64_t num_copies;
    int32_t page_size, num_kv_heads;
    int32_t k_row_bytes, v_row_bytes;  // bytes of one token and KV head
};

}  // namespace octavo
