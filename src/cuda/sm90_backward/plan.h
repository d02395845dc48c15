// How sm90_backward would work through a batch.
#pragma once

#include "cuda/attention_backward/tile_order.h"
#include "cuda/gpu.h"
#include "cuda/plan.h"
#include "cuda/sm90_backward/finished_counts.h"
#include "cuda/sm90_backward/tiles.h"
#include "params/attention_backward_params.h"

#include <optional>
#include <string>
#include <vector>

namespace octavo::cuda {

struct Sm90BackwardPlan {
    DType dtype;
    int32_t row;  // a row of kSm90BackwardTiles: with dtype and feature, the instance
    Sm90BackwardFeature feature;
    int32_t num_kv_heads, num_q_heads;
    int32_t group_parts;         // of the query heads of a KV head (GroupParts): CTAs for each tile of keys
    int32_t num_sequence_heads;  // sequences x KV heads x group_parts
    int32_t key_tiles;           // tiles of the longest sequence
    int32_t num_key_tiles;       // over the batch; a bound where it is packed
    int32_t num_query_tiles;     // the same of queries where dQ has a kernel of its own; otherwise 0
    TileOrder key_order, query_order;
    TurnOrder turn_order;   // in place of key_order where sums take their parts in order
    int32_t num_ctas;       // CTAs that share the tiles of keys
    int32_t sequence_rows;  // dense: the rows of workspace of each sequence
    int64_t num_rows;       // rows of the workspace, for each head
    bool dq_aligned;
    int64_t part_bytes, slope_bytes, sink_bytes, turn_bytes;

    const Sm90BackwardTiles& tiles() const { return kSm90BackwardTiles[row]; }
    int64_t delta_bytes() const { return num_q_heads * num_rows * 16; }
    int64_t lse_bytes() const { return score_terms(feature) * delta_bytes(); }
    int64_t dq_bytes() const {
        return tiles().dq_apart() ? 0 : num_q_heads * num_rows * tiles().head_dim * int64_t{sizeof(float)};
    }
    // How many parts of the gradients of slopes there are for each sequence and head.
    int32_t slope_parts() const { return key_tiles * tiles().consumer_warps(); }
    // Tiles of keys that were taken, and where sums are converted beside, FinishedCounts.
    int64_t num_counters() const {
        return converts_beside(tiles(), feature) ? FinishedCounts::kKeyTiles + num_sequence_heads : 1;
    }
    // What follows the counters is aligned to 128 bytes.
    int64_t counter_bytes() const { return (num_counters() * 4 + 127) / 128 * 128; }
    // In this order.
    int64_t workspace_bytes() const {
        return counter_bytes() + part_bytes + lse_bytes() + delta_bytes() + dq_bytes() + slope_bytes +
               sink_bytes + turn_bytes;
    }
};

// Returns nothing where it does not serve; why_not, unless null, then gets the reason. The last argument is
// for tests, whose calls are short.
std::optional<Sm90BackwardPlan> plan_sm90_backward(const AttentionBackwardParams& params, const Gpu& gpu,
                                                   std::string* why_not = nullptr,
                                                   bool in_turns_even_if_short = false);

Explanation describe(const Sm90BackwardPlan& plan);
inline bool operator==(const Sm90BackwardPlan& a, const Sm90BackwardPlan& b) {
    return describe(a).plan == describe(b).plan;
}

std::vector<std::string> sm90_backward_instances();

// Returns dout and the gradients as operands like those of the forward: q is dout, k dK, v dV and out dQ.
AttentionParams with_gradients(const AttentionBackwardParams& params);

}  // namespace octavo::cuda
