// Where append_kv puts a new token.
#pragma once

#include "common/fast_divide.h"
#include "params/cache_params.h"

#include <cstdint>

namespace octavo::cuda {

// Returns the sequence that packed token `token` belongs to: the last one that starts at or before it. A warp
// looks at 32 starts at a time.
__device__ __forceinline__ int32_t find_sequence(const IndexArray& cu_seqlens, int32_t batch, int64_t token) {
    int32_t low = 0, count = batch;  // it is among the `count` sequences from `low` on
    while (count > 1) {
        const int32_t step = (count + 31) / 32, own = step * static_cast<int32_t>(threadIdx.x % 32);
        const uint32_t reached = __ballot_sync(~0u, own < count && cu_seqlens[low + own] <= token);
        const int32_t skipped = step * (31 - __clz(reached | 1));
        low += skipped;
        count = min(step, count - skipped);
    }
    return low;
}

struct Place {
    bool exists;  // false if the token is padding, or lies behind the page table
    int64_t page, slot;
    int32_t position;  // the token's position in its sequence, where that is known
};

__device__ __forceinline__ Place find_place(const AppendKvParams& p, const FastDivide& page_size,
                                            int64_t token) {
    constexpr Place kNone{false, 0, 0, -1};
    if (p.slot_mapping) {
        const int64_t mapped = p.mapped_slot(token), page = mapped / p.page_size;
        return mapped < 0 ? kNone : Place{true, page, mapped - page * p.page_size, 0};
    }
    int32_t b = static_cast<int32_t>(token), from_end = 1;  // the last token of a sequence has from_end 1
    if (p.cu_seqlens) {
        if (token >= p.cu_seqlens[p.batch]) return kNone;
        b = find_sequence(p.cu_seqlens, p.batch, token);
        from_end = p.cu_seqlens[b + 1] - static_cast<int32_t>(token);
    }
    const int32_t position = p.seq_lens[b] - from_end;
    if (position < 0) return kNone;
    const int32_t page_index = page_size.quotient(position);
    if (page_index >= p.max_pages) return kNone;
    const int64_t page = p.page_table[b * p.page_table_stride + page_index];
    return {true, page, position - page_index * p.page_size, position};
}

}  // namespace octavo::cuda
