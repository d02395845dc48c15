// The rows of a CTA, and what happens to their scores: softcap, ALiBi, masks.
#pragma once

#include "common/score.h"
#include "params/attention_params.h"

#include <cstdint>

namespace octavo::cuda {

// A row: one query token of one query head.
struct TileRow {
    int32_t token;  // in its sequence
    int32_t head;
    float slope_log2;
    int32_t window_begin;  // see Visibility; kept here since mask_scores has no registers to compute it in
};

// A row of a sequence with bidirectional ranges. Its window's end is kept, so that the ranges are not
// searched again for each tile of keys.
struct RangedRow : TileRow {
    int32_t window_end;
};

__device__ __forceinline__ int32_t window_end_of(const TileRow& row, const Visibility& see,
                                                 int32_t first_q_pos) {
    return see.window_end(first_q_pos + row.token);
}
__device__ __forceinline__ int32_t window_end_of(const RangedRow& row, const Visibility&, int32_t) {
    return row.window_end;
}

// What the rows of one warp see. All lanes of the warp hold the same values.
struct WarpView {
    Visibility see;
    int32_t begin, end;            // the keys that some row sees lie in [0, prefix_len) and [begin, end)
    int32_t full_begin, full_end;  // all rows see the keys in [0, prefix_len) and in [full_begin, full_end)

    // The rows are at positions from first_q_pos to last_q_pos; there are none if `any` is false. A tree mask
    // may hide keys from `tree_begin` on.
    template <class See>
    __device__ WarpView(const See& see, bool any, int32_t first_q_pos, int32_t last_q_pos, int32_t tree_begin)
        : see(see),
          begin(any ? see.window_begin(first_q_pos) : 0),
          end(any ? see.window_end(last_q_pos) : 0),
          full_begin(see.window_begin(last_q_pos)),
          full_end(min(see.window_end(first_q_pos), tree_begin)) {
        if (!any) this->see.prefix_len = 0;
    }

    __device__ bool sees_any(int32_t first_key, int32_t keys) const {
        return (first_key < see.prefix_len) | ((first_key < end) & (first_key + keys > begin));
    }
    __device__ bool sees_all(int32_t first_key, int32_t keys) const {
        return (first_key + keys <= see.prefix_len) |
               ((first_key >= full_begin) & (first_key + keys <= full_end));
    }
};

// Calls body(row, i) for each of this lane's rows, two in each row tile; `rows` are those of the warp, and i
// counts this lane's.
template <int kRowTiles, class Row, class Body>
__device__ __forceinline__ void for_each_row(const Row* rows, Body body) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) body(rows[8 * i + threadIdx.x % 32 / 4], i);
}

// Applies softcap and ALiBi; scores are then in units of log2(e). Each is a branch that the whole warp takes
// or skips.
template <int kRowTiles, int kTiles, class Row>
__device__ __forceinline__ void transform_scores(float (&scores)[kRowTiles][kTiles][4],
                                                 const ScoreTransform& transform, bool has_alibi,
                                                 bool is_symmetric, const Row* rows, int32_t first_q_pos,
                                                 int32_t first_key) {
    auto for_each_score = [&](auto body) {
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) body(scores[t][i][j]);
            }
        }
    };
    if (transform.has_softcap) {
        for_each_score([&](float& score) { score = transform(score); });
    } else {
        for_each_score([&](float& score) { score *= transform.inner; });
    }
    if (!has_alibi) return;
    const int32_t first_column = first_key + 2 * (threadIdx.x % 4);
    for_each_row<kRowTiles>(rows, [&](const TileRow& row, int r) {
        const float bias = alibi_bias(row.slope_log2, first_q_pos + row.token, first_column);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float of_key = fmaf(row.slope_log2, 8 * i + j, bias);
                // A bias by the distance alone has the slope's opposite sign on both sides of a query.
                if (is_symmetric) of_key = copysignf(of_key, -row.slope_log2);
                scores[r / 2][i][2 * (r % 2) + j] += of_key;
            }
        }
    });
}

// Sets scores to -inf where the query does not see the key.
template <int kRowTiles, int kTiles, class Row>
__device__ __forceinline__ void mask_scores(float (&scores)[kRowTiles][kTiles][4], const Visibility& see,
                                            const Row* rows, int32_t first_q_pos, int32_t first_key) {
    const int32_t first_column = first_key + 2 * (threadIdx.x % 4);
    for_each_row<kRowTiles>(rows, [&](const Row& row, int r) {
        const int32_t end = max(window_end_of(row, see, first_q_pos), see.prefix_len) - first_column;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (8 * i + j >= end) scores[r / 2][i][2 * (r % 2) + j] = -INFINITY;
        }
    });
    if (see.window_left < 0) return;
    for_each_row<kRowTiles>(rows, [&](const TileRow& row, int r) {
        // The keys between the prefix and the window are hidden.
        const int32_t begin = see.prefix_len - first_column;
        const uint32_t count = max(row.window_begin - see.prefix_len, 0);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (static_cast<uint32_t>(8 * i + j - begin) < count)
                    scores[r / 2][i][2 * (r % 2) + j] = -INFINITY;
            }
        }
    });
}

// Sets all scores to -inf in those of this lane's rows whose bit is set.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void hide_rows(float (&scores)[kRowTiles][kTiles][4], uint32_t rows) {
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) {
        if (!(rows >> r & 1)) continue;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) scores[r / 2][i][2 * (r % 2) + j] = -INFINITY;
        }
    }
}

// Sets scores to -inf where the tree mask hides the key. `first_token`: the sequence's first token among all
// queries.
template <int kRowTiles, int kTiles, class Slice, class Row>
__device__ __forceinline__ void mask_tree(float (&scores)[kRowTiles][kTiles][4], const AttentionParams& p,
                                          const Slice& seq, int64_t first_token, const Row* rows,
                                          int32_t first_key) {
    static_assert(8 * kTiles <= kMaxTreeTokens, "a tile's keys have a bit each");
    const int32_t first_column = first_key + 2 * (threadIdx.x % 4);
    for_each_row<kRowTiles>(rows, [&](const TileRow& row, int r) {
        // Behind the last query, `row` is uninitialised memory.
        if (static_cast<uint32_t>(row.token) >= static_cast<uint32_t>(seq.seqlen_q)) return;
        const uint64_t hidden = hidden_by_tree(p.tree_word(first_token + row.token), seq.q_pos(0),
                                               seq.see.prefix_len, first_column);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (hidden >> (8 * i + j) & 1) scores[r / 2][i][2 * (r % 2) + j] = -INFINITY;
        }
    });
}

}  // namespace octavo::cuda
