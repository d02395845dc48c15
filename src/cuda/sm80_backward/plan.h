// How sm80_backward would work through a batch.
#pragma once

#include "cuda/attention_backward/tile_order.h"
#include "cuda/gpu.h"
#include "cuda/plan.h"
#include "cuda/sm80_backward/tiles.h"
#include "params/attention_backward_params.h"

#include <string>
#include <vector>

namespace octavo::cuda {

struct Sm80BackwardPlan {
    DType dtype;
    int32_t row;       // a row of kSm80BackwardTiles; with dtype and the next three the instance
    bool has_dropout;  // dropout, chunks or symmetric ALiBi: the same instances serve all of them
    bool has_blocks;   // a block mask; its instances serve dropout and chunks, too
    bool has_ranges;   // bidirectional ranges; likewise
    int32_t num_q_heads, num_kv_heads;
    int32_t group_parts;  // of the query heads of a KV head (GroupParts): CTAs for each tile of keys
    int32_t key_tiles, query_tiles;          // tiles of the longest sequence
    int32_t num_key_tiles, num_query_tiles;  // over the batch; bounds where it is packed
    TileOrder key_order;                     // of the kernel of the keys
    bool q_aligned, k_aligned, v_aligned, out_aligned, dout_aligned, dq_aligned, dk_aligned, dv_aligned;
    // Whether the kernel of the keys adds to sums of dQ, whose bits then depend on the order in which CTAs
    // come. Otherwise a kernel of the queries computes dQ, and the gradients of slopes.
    bool sums_dq;
    int32_t sequence_rows;  // dense arrays: rows of these sums for each sequence
    int64_t num_rows;       // rows of these sums for each head
    int64_t part_bytes, statistics_bytes, slope_bytes, sink_bytes;  // pieces of the workspace

    const Sm80BackwardTiles& tiles() const { return kSm80BackwardTiles[row]; }
    int64_t dq_bytes() const {
        return sums_dq ? num_q_heads * num_rows * tiles().head_dim * int64_t{sizeof(float)} : 0;
    }
    int64_t workspace_bytes() const {
        return part_bytes + statistics_bytes + dq_bytes() + slope_bytes + sink_bytes;
    }
};

// Serves every problem. Throws ValueError where a grid would be too large.
Sm80BackwardPlan plan_sm80_backward(const AttentionBackwardParams& params, const Gpu& gpu);

Explanation describe(const Sm80BackwardPlan& plan);
inline bool operator==(const Sm80BackwardPlan& a, const Sm80BackwardPlan& b) {
    return describe(a).plan == describe(b).plan;
}

std::vector<std::string> sm80_backward_instances();

}  // namespace octavo::cuda
