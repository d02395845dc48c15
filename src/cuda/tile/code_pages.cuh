// Where the codes of a key or value lie, and its scale, by offsets of 32 bits (is_within_reach).
#pragma once

#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// The keys or the values of the cache.
struct CodePages {
    struct Strides {
        uint32_t page, token, head;

        __device__ Strides(int64_t page, int64_t token, int64_t head)
            : page(static_cast<uint32_t>(page)),
              token(static_cast<uint32_t>(token)),
              head(static_cast<uint32_t>(head)) {}
        // How far the row of a key lies behind the first row of the cache.
        template <class Place>
        __device__ uint32_t operator()(const Place& at) const {
            return at.page * page + at.slot * token + at.kv_head * head;
        }
    };
    const uint8_t* codes;
    Strides strides;         // in units of 16 bytes
    const uint32_t* scales;  // null: softmax_scale and out_scale include them
    Strides scale_strides;   // in words
    int32_t row_bytes;

    __device__ static CodePages keys(const AttentionParams& p) {
        return {p.k, p.k_outer_stride, p.k_token_stride, p.k_head_stride, p.k_scales, p.head_dim, p.k_dtype};
    }
    __device__ static CodePages values(const AttentionParams& p) {
        return {p.v, p.v_outer_stride, p.v_token_stride, p.v_head_stride, p.v_scales, p.head_dim, p.v_dtype};
    }

  private:
    __device__ CodePages(const void* codes, int64_t page_stride, int64_t token_stride, int64_t head_stride,
                         const CacheScales& scales, int32_t head_dim, DType dtype)
        : codes(static_cast<const uint8_t*>(codes)),
          strides(page_stride / 16, token_stride / 16, head_stride / 16),
          scales(static_cast<const uint32_t*>(scales.data)),
          scale_strides(scales.page_stride, scales.token_stride, scales.head_stride),
          row_bytes(dtype == DType::int4 ? head_dim / 2 : head_dim) {}
};

}  // namespace octavo::cuda
