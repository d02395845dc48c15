// The argument that all kernels of sm90_backward take besides the call's parameters.
#pragma once

#include "common/macros.h"
#include "cuda/attention_backward/sink_terms.h"
#include "cuda/attention_backward/slope_parts.h"
#include "cuda/attention_backward/tile_order.h"
#include "cuda/attention_backward/workspace_rows.h"
#include "cuda/sm90_backward/finished_counts.h"
#include "params/attention_backward_params.h"

#include <cuda.h>

#include <cstdint>

namespace octavo::cuda {

// Every array is a tensor of five axes with an edge, as Sm90Launch describes it.
struct Sm90BackwardLaunch {
    CUtensorMap q, dout, k, v, dk, dv;
    CUtensorMap dq;  // unset where dQ is summed
    int32_t q_edge, k_edge;
    int32_t group_parts;    // as many KV heads of the call share a head of K and V (GroupParts)
    TileOrder key_order;    // tiles of keys, for each sequence and KV head
    TileOrder query_order;  // where dQ has a kernel of its own: tiles of queries, for each query head
    // Rows of queries in workspace: whole tiles for each sequence.
    int32_t sequence_rows;  // dense arrays: rows of each sequence
    int64_t num_rows;       // rows of each head
    int32_t num_tiles;      // tiles of each head
    float scale_log2;       // softmax_scale in units of log2(e)
    // Statistics of queries, [num_q_heads, num_rows], each of the type that its instance takes (prepare.cuh);
    // of lse with symmetric ALiBi two of these, one behind the other.
    void* lse;
    void* delta;
    int32_t* tiles_taken;  // tiles of keys that CTAs took: all of them in turns (below) or where sums are
                           // converted beside, otherwise after their first one
    FinishedCounts sums;
    int32_t num_counters;  // tiles_taken and those behind it, which the first kernel sets to zero
    float* dq_sums;        // [num_q_heads, num_rows / queries of a tile], each as its accumulators lie
    bool dq_aligned;
    SlopeParts slopes;  // one part for each tile of keys and warp of consumers
    SinkTerms sinks;    // terms of num_rows rows
    // Where sums take their parts in order: the order of tiles of keys, and for each tile of queries of
    // dq_sums and each warpgroup, 1 and the number in its sequence of the tile of keys that added last, or 0.
    TurnOrder turn_order;
    int32_t* turns;
};

// How many rows of terms there are for keys on one side of their queries; behind them lie those for the
// other.
OCTAVO_HD int64_t num_terms(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan) {
    return p.num_q_heads * plan.num_rows;
}

// A sequence's place on the outer axis of q or dO. Where all sequences share the array's rows, by a batch
// stride of zero, there is one such place (Sm90Operands).
OCTAVO_HD int32_t query_outer(const AttentionBackwardParams& p, int64_t batch_stride, int32_t batch) {
    return p.cu_seqlens_q || batch_stride == 0 ? 0 : batch;
}

}  // namespace octavo::cuda
