// Which blocks of queries x keys block-sparse attention looks at (FlashAttention, Dao et al. 2022, section
// 3.3). Blocks are counted from the first query and the first key of a sequence, whereas the other masks,
// causal or a window, go by positions.
#pragma once

#include "common/macros.h"
#include "common/visibility.h"

#include <cstdint>

namespace octavo {

struct BlockMask {
    // [batch, heads, query blocks, key blocks]; a block is looked at unless it is 0; null: there is no mask.
    const uint8_t* data;
    int64_t batch_stride, head_stride, row_stride;  // 0 where all share an entry
    int32_t size;                                   // queries, and keys, in a block

    OCTAVO_HD explicit operator bool() const { return data != nullptr; }

    // The row of the mask, [key blocks], for one query of a head.
    OCTAVO_HD const uint8_t* row(int32_t batch, int32_t head, int32_t query) const {
        return data + batch * batch_stride + head * head_stride + query / size * row_stride;
    }
    OCTAVO_HD bool sees(int32_t batch, int32_t head, int32_t query, int32_t key) const {
        return row(batch, head, query)[key / size] != 0;
    }

    // Whether the query at `q_pos` sees any key through both this mask and `see`.
    OCTAVO_HD bool sees_any(const Visibility& see, int32_t batch, int32_t head, int32_t query,
                            int32_t q_pos) const {
        if (!data) return see.sees_any(q_pos);
        const uint8_t* const blocks = row(batch, head, query);
        const int32_t begin = see.window_begin(q_pos), end = see.window_end(q_pos);
        for (int32_t first = 0; first < see.seqlen_k; first += size) {
            const bool may = first < see.prefix_len || (first < end && first + size > begin && begin < end);
            if (may && blocks[first / size]) return true;
        }
        return false;
    }
};

}  // namespace octavo
