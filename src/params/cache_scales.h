// The scales that the codes of a cache are multiplied by, where they lie in memory.
#pragma once

#include "common/macros.h"

#include <cstdint>

namespace octavo {

// A word of 4 bytes for each token and KV head: for codes of 8 bits a scale (float32), for int4 a scale and a
// minimum (two float16, in this order); a value is scale x code (+ minimum). Strides count words. Static
// scales, a single one or one for each KV head, have strides of zero between pages and tokens.
struct CacheScales {
    void* data;  // null: there are none
    int64_t page_stride, token_stride, head_stride;

    OCTAVO_HD uint32_t& word(int64_t page, int64_t slot, int64_t head) const {
        return static_cast<uint32_t*>(data)[page * page_stride + slot * token_stride + head * head_stride];
    }
};

}  // namespace octavo
