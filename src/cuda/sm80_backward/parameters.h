// What the launches of sm80_backward hand to their kernels.
#pragma once

#include "cuda/attention_backward/sink_terms.h"
#include "cuda/attention_backward/slope_parts.h"
#include "cuda/attention_backward/tile_order.h"
#include "params/attention_backward_params.h"

#include <cstdint>

namespace octavo::cuda {

// What the gradients need of a query and one of its heads.
struct QueryStatistics {
    float lse;    // in units of log2(e); infinite where the query sees no key, so that all weights are zero
    float delta;  // the dot product of dout and out, less dlse; each v . dout is reduced by it
};

struct Sm80BackwardLaunch {
    QueryStatistics* statistics;  // [num_q_heads, total_q]
    SlopeParts slopes;            // one for each tile of queries
    SinkTerms sinks;              // the terms of all total_q queries
    TileOrder key_order;
    int32_t group_parts;  // as many KV heads of the call share a head of K and V (GroupParts)
    // Sums of dQ, [num_q_heads, num_rows / queries of a tile], in a tile by warps, and as accumulators lie,
    // from sm_90 on four of a lane side by side (QuerySums::place); null where query_gradients_kernel
    // computes dQ. Dense arrays have sequence_rows rows for each sequence.
    float* dq_sums;
    int64_t num_rows;
    int32_t sequence_rows;
    int32_t query_tiles, key_tiles;  // tiles of the longest sequence
    // Whether every row starts at a multiple of 16 bytes, so that it can move in pieces of 16 bytes.
    bool q_aligned, k_aligned, v_aligned, out_aligned, dout_aligned, dq_aligned, dk_aligned, dv_aligned;
};

}  // namespace octavo::cuda
