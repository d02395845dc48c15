// What the numbers of a cache are multiplied by, where that stands in memory.
#pragma once

#include <cstdint>

namespace octavo {

// A word of 4 bytes for each token and KV head: of codes of 8 bits a scale (float32), of int4 a scale and a
// minimum (two float16, in this order); a value is scale x code (+ minimum). Strides count words. Static
// scales, one or one for each KV head, have strides of zero between pages and tokens.
struct CacheScales {
    void* data;  // null: there are none
    int64_t page_stride, token_stride, head_stride;
};

}  // namespace octavo
