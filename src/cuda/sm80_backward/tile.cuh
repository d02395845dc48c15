// What both kernels of sm80_backward do with tiles: they find them, load and store their rows, and turn dot
// products into softmax weights and gradients of scores.
#pragma once

#include "common/query_range.h"
#include "common/score.h"
#include "cuda/ptx/exp2.h"
#include "cuda/sequence_tile.cuh"
#include "cuda/sm80_backward/parameters.h"
#include "cuda/sm80_backward/tiles.h"
#include "cuda/tile/load.cuh"
#include "cuda/tile/multiply.cuh"
#include "cuda/types.h"
#include "cuda/warp.cuh"

#include <cstdint>
#include <type_traits>

namespace octavo::cuda {

// The configuration of one of the two kernels at a head dim, as tile/load.cuh and tile/multiply.cuh expect
// it. kParts warps share the same rows.
template <int kHeadDim_, int kWarps_, int kRowTiles_, int kColumns_, int kStages_, int kParts_ = 1,
          int kDsSlots_ = 1>
struct BackwardConfig {
    static constexpr int kHeadDim = kHeadDim_, kWarpColumns = kHeadDim;
    static constexpr int kWarps = kWarps_, kParts = kParts_;
    static constexpr int kDsSlots = kDsSlots_;
    static constexpr int kRowTiles = kRowTiles_;
    static constexpr int kKeys = kColumns_;  // columns, be they keys or queries
    static constexpr int kStages = kStages_;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kWarpRows = 16 * kRowTiles;
    static constexpr int kRows = kWarps / kParts * kWarpRows;
    static constexpr int kRowStride = sm80_backward_row_stride(kHeadDim);
    static constexpr int kLanesPerRow = kHeadDim % 64 == 0 ? 8 : 4;
};

// The rows of one array at a sequence and head.
template <class T>
struct RowArray {
    const T* base;
    int64_t stride;
    bool aligned;
};

// Copies kTileRows rows from `first` on to a tile in shared memory, with this thread's current cp.async
// group. A row for which is_read(row) does not hold becomes zeros.
template <class T, class Config, int kTileRows, class IsRead>
__device__ __forceinline__ void load_tile(T* tile, const RowArray<T>& array, int32_t first, int32_t head_dim,
                                          IsRead is_read) {
    using Copy = TileCopy<T, Config, kTileRows>;
    const T* source[Copy::kCount];
    uint32_t valid = 0;
#pragma unroll
    for (int i = 0; i < Copy::kCount; ++i) {
        const int32_t row = first + Copy::row() + i * Copy::kRowsAtOnce;
        const bool inside = is_read(row);
        valid |= inside << i;
        source[i] = array.base + (inside ? row * array.stride + Copy::column() : 0);
    }
    Copy::template run<false>(ptx::shared_address(tile + Copy::row() * Config::kRowStride + Copy::column()),
                              source, valid, Copy::column(), head_dim, array.aligned);
}

// Writes a warp's gradients, times `scale`, to the rows of an array. `rows` is room for them in shared
// memory, kRowStride apart, which no other warp uses.
template <class T, class Config, int kDims, int kRowStride = Config::kRowStride>
__device__ __forceinline__ void store_gradients(const float (&gradients)[Config::kRowTiles][kDims / 8][4],
                                                float scale, T* rows, T* target, int64_t stride, bool aligned,
                                                int32_t num_rows, int32_t num_dims) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < Config::kRowTiles; ++t) {
#pragma unroll
        for (int i = 0; i < kDims / 8; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* const pair = gradients[t][i] + 2 * half;
                T* const to = rows + (16 * t + 8 * half + lane / 4) * kRowStride + 8 * i + 2 * (lane % 4);
                *reinterpret_cast<uint32_t*>(to) = pack<T>(pair[0] * scale, pair[1] * scale);
            }
        }
    }
    __syncwarp();
    constexpr int kLanes = kDims / 8 < 16 ? 8 : 16;
    for (int row = lane / kLanes; row < min(num_rows, Config::kWarpRows); row += 32 / kLanes) {
        const T* const from = rows + row * kRowStride;
        T* const to = target + row * stride;
        for (int d = 8 * (lane % kLanes); d < num_dims; d += 8 * kLanes) {
            if (aligned) {
                *reinterpret_cast<uint4*>(to + d) = *reinterpret_cast<const uint4*>(from + d);
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) to[d + j] = from[d + j];
            }
        }
    }
    __syncwarp();
}

// Draws which weights dropout keeps, one bit each, in words of 32 keys: [queries, kKeyCount / 32] in shared
// memory. Both counts are those of a tile; first_key must be a multiple of 32.
template <int kThreads, int kQueryCount, int kKeyCount>
__device__ __forceinline__ void draw_kept(uint32_t* words, const Dropout& dropout, uint64_t head,
                                          int32_t first_query, int32_t first_key) {
    constexpr int kBlocks = kKeyCount / 32;
    static_assert(kBlocks * 32 == kKeyCount);
#pragma unroll 1
    for (int i = threadIdx.x; i < kQueryCount * kBlocks * 4; i += kThreads) {
        const int pair = i % 4, block = i / 4 % kBlocks, query = i / 4 / kBlocks;
        const Philox random = dropout.bits(head, first_query + query, first_key / 32 + block, pair);
        uint32_t kept = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            kept |= dropout.drops_even(random.words[w]) ? 0 : 1u << (8 * w + 2 * pair);
            kept |= dropout.drops_odd(random.words[w]) ? 0 : 2u << (8 * w + 2 * pair);
        }
        kept |= __shfl_xor_sync(~0u, kept, 1);
        kept |= __shfl_xor_sync(~0u, kept, 2);
        if (pair == 0) words[query * kBlocks + block] = kept;
    }
}

// Returns sequence `b` of the batch. The instances with dropout serve chunks, too, since chunks made the
// others spill registers.
template <bool kDropout, bool kRanges>
__device__ __forceinline__ auto sequence_of(const AttentionParams& p, int32_t b) {
    using Slice = std::conditional_t<kRanges, RangedSlice, SequenceSlice>;
    Slice seq = Slice::make(p, b);
    if constexpr (!kDropout) seq.see.attention_chunk = {};
    return seq;
}

// The bidirectional ranges of a lane's rows, in the instances for ranges. The first row is at `first_pos`.
template <int kRows, bool kRanges>
struct RangesOfRows {
    RangedVisibility::Range of_row[kRanges ? kRows : 1];

    template <class See>
    __device__ __forceinline__ static RangesOfRows make(const See& see, int32_t first_pos) {
        RangesOfRows ranges{};
        if constexpr (kRanges) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) ranges.of_row[r] = see.range_of(first_pos + 8 * r);
        }
        return ranges;
    }
};

// Turns q . k and v . dout of a warp's tile into weights and gradients of scores.
template <bool kKeysAreRows, bool kDropout, bool kBlocks, int kKeyCount, class Slice>
struct ScoreGradients {
    static constexpr bool kRanges = decltype(Slice::see)::kHasRanges;
    static constexpr bool kMayDrop = kBlocks || kRanges;  // dropout is a branch

    const Slice& seq;
    ScoreTransform transform;
    bool has_alibi;
    bool is_symmetric;  // in the instances with dropout, so that others have no instruction for it
    float slope_log2;   // the slope of this head; 0 without ALiBi
    float out_scale;
    const uint32_t* kept;   // draw_kept()'s bits of the CTA's tile; with kMayDrop null if nothing is dropped
    int32_t warp_row;       // the warp's first row in that tile
    const uint8_t* blocks;  // with kBlocks: the block mask of the sequence and the head
    const BlockMask* block_mask;
    const RangedVisibility::Range* ranges;  // with kRanges: those of this lane's rows

    // Turns `scores` into weights, and `products` into the gradients of q . k without softmax_scale. Rows and
    // columns of this lane's element (t, i, j) are counted from first_row, the warp's first, and from
    // first_column, the tile's first. statistics(t, i, j) are those of the element's query. Returns this
    // lane's part of the gradient of the slope.
    template <int kRowTiles, int kTiles, class Statistics>
    __device__ __forceinline__ float run(float (&scores)[kRowTiles][kTiles][4],
                                         float (&products)[kRowTiles][kTiles][4], int32_t first_row,
                                         int32_t first_column, bool is_masked, Statistics statistics) const {
        const bool plain = !transform.has_softcap && !has_alibi;
        if (plain && !is_masked)
            return loop<true, false>(scores, products, first_row, first_column, statistics);
        if (plain) return loop<true, true>(scores, products, first_row, first_column, statistics);
        return loop<false, true>(scores, products, first_row, first_column, statistics);
    }

  private:
    __device__ __forceinline__ bool looks_at(int32_t query, int32_t key) const {
        if constexpr (kBlocks)
            return blocks[query / block_mask->size * block_mask->row_stride + key / block_mask->size] != 0;
        return true;
    }

    // The columns that a row of this lane sees, counted from the tile's first.
    struct SeenColumns {
        int32_t begin;
        uint32_t count;
        int32_t prefix_end;  // where queries are rows; columns before it are seen, too

        __device__ __forceinline__ bool has(int32_t column) const {
            return static_cast<uint32_t>(column - begin) < count || (!kKeysAreRows && column < prefix_end);
        }
    };
    __device__ __forceinline__ SeenColumns seen_by(int32_t row, int32_t first_column) const {
        const Visibility& see = seq.see;
        int32_t begin = 0, end = 0;
        if constexpr (kKeysAreRows) {
            const QueryRange queries(see, seq.seqlen_q, row, row + 1);
            if (row < see.seqlen_k) begin = queries.begin, end = queries.end;
        } else if (row < seq.seqlen_q) {
            begin = see.window_begin(seq.q_pos(row));
            end = see.window_end(seq.q_pos(row));
        }
        return {begin - first_column, static_cast<uint32_t>(max(end - begin, 0)),
                see.prefix_len - first_column};
    }

    // What a row sees besides, in its range. `row`: of the lane, as RangesOfRows counts them.
    __device__ __forceinline__ bool sees_in_range(int32_t query, int32_t key, int row) const {
        if constexpr (kRanges) {
            const Visibility& see = seq.see;
            const int32_t q_pos = seq.q_pos(query), other = kKeysAreRows ? q_pos : key;
            return ranges[row].begin <= other && other < ranges[row].end && query < seq.seqlen_q &&
                   key < see.seqlen_k && (!seq.see.keep_window_left || key >= see.window_begin(q_pos));
        }
        return false;
    }

    template <bool kPlain, bool kMasked, int kRowTiles, int kTiles, class Statistics>
    __device__ __forceinline__ float loop(float (&scores)[kRowTiles][kTiles][4],
                                          float (&products)[kRowTiles][kTiles][4], int32_t first_row,
                                          int32_t first_column, Statistics statistics) const {
        const int lane = threadIdx.x % 32;
        float slope_gradient = 0.0f;
        SeenColumns seen[2 * kRowTiles];
        if constexpr (kMasked) {
#pragma unroll
            for (int r = 0; r < 2 * kRowTiles; ++r)
                seen[r] = seen_by(first_row + 8 * r + lane / 4, first_column);
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int row = 16 * t + 8 * (j / 2) + lane / 4, column = 8 * i + 2 * (lane % 4) + j % 2;
                    [[maybe_unused]] const int32_t query =
                        kKeysAreRows ? first_column + column : first_row + row;
                    [[maybe_unused]] const int32_t key =
                        kKeysAreRows ? first_row + row : first_column + column;
                    const QueryStatistics of_query = statistics(t, i, j);
                    float score = scores[t][i][j] * transform.inner, slack = 1.0f;
                    if (!kPlain) {
                        if (transform.has_softcap) {
                            const float tanh = ScoreTransform::tanh(score);
                            score = transform.outer * tanh;
                            slack = 1.0f - tanh * tanh;
                        }
                        const auto distance = static_cast<float>(seq.q_pos(query) - key);
                        score -= slope_log2 * (kDropout && is_symmetric ? fabsf(distance) : distance);
                    }
                    float weight = ptx::exp2_approx(score - of_query.lse);
                    float product = products[t][i][j];
                    bool is_kept = true;
                    if (kDropout && !(kMayDrop && !kept)) {
                        constexpr int kWords = kKeyCount / 32;
                        const int q = kKeysAreRows ? column : warp_row + row;
                        const int k = kKeysAreRows ? warp_row + row : column;
                        is_kept = kept[q * kWords + k / 32] >> k % 32 & 1;
                        product = is_kept ? product * out_scale : 0.0f;
                    }
                    float gradient = weight * (product - of_query.delta);
                    if (kMasked &&
                        !((seen[2 * t + j / 2].has(column) || sees_in_range(query, key, 2 * t + j / 2)) &&
                          looks_at(query, key))) {
                        weight = gradient = 0.0f;
                        slack = 1.0f;  // for a key that no query sees, it may be NaN
                    }
                    if (!kPlain) {
                        const auto way = static_cast<float>(key - seq.q_pos(query));
                        slope_gradient += gradient * (kDropout && is_symmetric ? -fabsf(way) : way);
                    }
                    scores[t][i][j] = is_kept ? weight : 0.0f;
                    products[t][i][j] = gradient * slack;
                }
            }
        }
        return slope_gradient;
    }
};

// Packs the accumulators of two groups of eight columns into operand a of a product over these 16 columns.
template <class T, int kRowTiles, int kTiles>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[kRowTiles][4],
                                             const float (&values)[kRowTiles][kTiles][4], int group) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* const pair = values[t][group + j / 2] + 2 * (j % 2);
            a[t][j] = pack<T>(pair[0], pair[1]);
        }
    }
}

}  // namespace octavo::cuda
