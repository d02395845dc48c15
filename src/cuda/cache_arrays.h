// Questions that plans ask about the arrays of a cache.
#pragma once

#include "cuda/alignment.h"
#include "cuda/plan.h"
#include "params/attention_params.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace octavo::cuda {

struct Axis {
    int64_t length, stride;
};

// Whether 32-bit offsets, in units of 16 bytes, reach every row. The largest one stands for no row
// (KeyGatherer).
inline bool is_within_reach(DType dtype, std::initializer_list<Axis> axes) {
    int64_t last = 0;
    for (const Axis& axis : axes) {
        if (axis.length > 1 && axis.stride < 0) return false;
        last += std::max(axis.length - 1, int64_t{0}) * axis.stride;
    }
    return last / (16 / size_of(dtype)) < (int64_t{1} << 32) - 1;
}

inline bool is_within_reach(const AttentionParams& p, DType dtype, int64_t outer_stride, int64_t token_stride,
                            int64_t head_stride) {
    return is_within_reach(
        dtype, {{p.num_pages, outer_stride}, {p.page_size, token_stride}, {p.num_kv_heads, head_stride}});
}

// The same for scales, whose offsets are in words.
inline bool is_within_reach(const AttentionParams& p, const CacheScales& scales) {
    return is_within_reach(p, DType::int32, 4 * scales.page_stride, 4 * scales.token_stride,
                           4 * scales.head_stride);
}

// Whether a kernel can load 16 bytes of codes at a time, from places that CodePages finds. If it cannot,
// why_not, unless null, gets the reason.
inline bool can_load_codes(const AttentionParams& p, std::string* why_not) {
    if (!aligned(p.k, 16, {p.k_outer_stride, p.k_token_stride, p.k_head_stride}, p.k_dtype) ||
        !aligned(p.v, 16, {p.v_outer_stride, p.v_token_stride, p.v_head_stride}, p.v_dtype)) {
        refuse(why_not,
               "it loads 16 bytes of codes at a time, and some row of k_pages or v_pages does not begin on a "
               "multiple of 16 bytes");
        return false;
    }
    if (!is_within_reach(p, p.k_dtype, p.k_outer_stride, p.k_token_stride, p.k_head_stride) ||
        !is_within_reach(p, p.v_dtype, p.v_outer_stride, p.v_token_stride, p.v_head_stride) ||
        !is_within_reach(p, p.k_scales) || !is_within_reach(p, p.v_scales)) {
        refuse(why_not,
               "its offsets reach the 64 GB behind an array's first element, those of scales 16 GB, and "
               "k_pages, v_pages or scales have elements beyond, or negative strides");
        return false;
    }
    return true;
}

// Whether each key has a scale of its own: scales of whole KV heads have strides of zero.
inline bool has_token_scales(const CacheScales& scales) {
    return scales.data && (scales.page_stride != 0 || scales.token_stride != 0);
}
inline bool has_token_scales(const AttentionParams& p) {
    return has_token_scales(p.k_scales) || has_token_scales(p.v_scales);
}

}  // namespace octavo::cuda
