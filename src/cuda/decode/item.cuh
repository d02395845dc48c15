// The work of the decode kernels: items, each one KV head of one sequence, and their blocks of keys.
#pragma once

#include "common/fast_divide.h"
#include "common/visibility.h"
#include "cuda/decode/tiles.h"
#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// The blocks that the queries of a sequence see.
template <int kBlockKeys>
__device__ __forceinline__ KeyTiles key_blocks(const SequenceSlice& seq) {
    return KeyTiles(seq.see, seq.q_pos(0), seq.q_pos(seq.seqlen_q - 1), kBlockKeys);
}

// One item, and its place in the order of all blocks of the batch.
struct Item {
    int32_t sequence, kv_head;
    int32_t begin, end;  // blocks, counted over the batch, or (split-KV) from the item's first
};

// A row of an item: a query token of a query head.
struct DecodeRow {
    int32_t token, head;
    bool valid;

    __device__ DecodeRow(const SequenceSlice& seq, const FastDivide& group_size, int32_t kv_head, int32_t row)
        : token(group_size.quotient(row)),
          head(kv_head * static_cast<int32_t>(group_size.divisor) + row -
               token * static_cast<int32_t>(group_size.divisor)),
          valid(token < seq.seqlen_q) {}
};

}  // namespace octavo::cuda
