// Copies rows of codes to shared memory, where they arrive as 16-bit numbers. Page:
// docs/kernels/quantised_prefill.md.
#pragma once

#include "common/codes.h"
#include "cuda/types.h"
#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// The keys or the values of a cache of codes, at the KV head of a CTA.
struct CodeArray {
    const uint8_t* base;
    int64_t page_stride, token_stride;  // bytes
    DType type;
    CacheScales scales;  // at that head
    bool aligned;        // every 8 codes start at a multiple of 8 bytes, or of 4 for int4

    __device__ static CodeArray keys(const AttentionParams& p, int32_t kv_head) {
        return make(p.k, p.k_outer_stride, p.k_token_stride, p.k_head_stride, p.k_dtype, p.k_scales, kv_head);
    }
    __device__ static CodeArray values(const AttentionParams& p, int32_t kv_head) {
        return make(p.v, p.v_outer_stride, p.v_token_stride, p.v_head_stride, p.v_dtype, p.v_scales, kv_head);
    }

    struct Row {
        const uint8_t* codes;
        float scale, minimum;
    };
    __device__ Row row(int64_t page, int64_t slot) const {
        Row row{base + page * page_stride + slot * token_stride, 1.0f, 0.0f};
        if (scales.data == nullptr) return row;  // softmax_scale and out_scale include them
        const uint32_t word = scales.word(page, slot, 0);
        if (type == DType::int4) {
            row.scale = scale_of_int4_word(word);
            row.minimum = minimum_of_int4_word(word);
        } else {
            row.scale = float_of_bits(word);
        }
        return row;
    }

    // Loads eight numbers of a row from `column` on, a multiple of eight.
    template <class T>
    __device__ uint4 load(const Row& row, int32_t column) const {
        const bool is_int4 = type == DType::int4;
        const uint8_t* const from = row.codes + (is_int4 ? column / 2 : column);
        uint2 codes = make_uint2(0, 0);
        if (aligned) {
            codes = is_int4 ? make_uint2(*reinterpret_cast<const uint32_t*>(from), 0)
                            : *reinterpret_cast<const uint2*>(from);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (is_int4 && i >= 4) break;
                (i < 4 ? codes.x : codes.y) |= static_cast<uint32_t>(from[i]) << (i % 4 * 8);
            }
        }
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs[i] = pack<T>(value(row, codes, 2 * i), value(row, codes, 2 * i + 1));
        return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }

  private:
    __device__ static CodeArray make(const void* data, int64_t page_stride, int64_t token_stride,
                                     int64_t head_stride, DType type, CacheScales scales, int32_t kv_head) {
        const auto* const base = static_cast<const uint8_t*>(data) + kv_head * head_stride;
        if (scales.data != nullptr) scales.data = &scales.word(0, 0, kv_head);
        const int64_t bytes = type == DType::int4 ? 4 : 8;
        const bool aligned = reinterpret_cast<uintptr_t>(base) % bytes == 0 && page_stride % bytes == 0 &&
                             token_stride % bytes == 0;
        return {base, page_stride, token_stride, type, scales, aligned};
    }
    __device__ float value(const Row& row, const uint2& codes, int i) const {
        if (type == DType::int4)
            return fmaf(row.scale, static_cast<float>(codes.x >> (4 * i) & 15u), row.minimum);
        const uint32_t code = (i < 4 ? codes.x : codes.y) >> (i % 4 * 8) & 0xffu;
        float value = static_cast<float>(static_cast<int8_t>(code));
        if (type == DType::float8_e4m3fn) value = float8_to_float<E4m3>(static_cast<uint8_t>(code));
        if (type == DType::float8_e5m2) value = float8_to_float<E5m2>(static_cast<uint8_t>(code));
        return row.scale * value;
    }
};

}  // namespace octavo::cuda
