// How sm80_attention would work through a batch.
#pragma once

#include "cuda/gpu.h"
#include "cuda/plan.h"
#include "cuda/sm80_attention/tiles.h"
#include "params/attention_params.h"

#include <string>
#include <vector>

namespace octavo::cuda {

struct Sm80Plan {
    DType dtype;
    int32_t row;  // a row of kSm80Tiles; with dtype and feature it names the instance
    Sm80Feature feature;
    DType k_dtype, v_dtype;  // the same as dtype, unless pages hold codes
    int32_t num_sequences;
    int32_t head_dim_v, num_kv_heads;
    int32_t num_row_tiles;     // over the batch; a bound when the queries are packed
    int32_t num_splits;        // runs of keys into which the keys of every row are cut
    int64_t num_partial_rows;  // [num_splits, total_q, num_q_heads]; 0 without splits
    bool q_aligned, k_aligned, v_aligned, out_aligned;  // whether all rows move in pieces of 16 bytes

    const Sm80Tiles& tiles() const { return kSm80Tiles[row]; }
    Grid grid() const { return {num_row_tiles, num_kv_heads, num_splits}; }
    int32_t threads() const { return 32 * tiles().warps; }
    int64_t workspace_bytes() const { return num_partial_rows * (head_dim_v + 1) * int64_t{sizeof(float)}; }
};

// Serves every problem that has a query; other kernels are faster where they serve. Throws ValueError where
// the grid would be too large.
Sm80Plan plan_sm80_attention(const AttentionParams& params, const Gpu& gpu);

Explanation describe(const Sm80Plan& plan);
inline bool operator==(const Sm80Plan& a, const Sm80Plan& b) { return describe(a).plan == describe(b).plan; }

std::vector<std::string> sm80_attention_instances();

}  // namespace octavo::cuda
