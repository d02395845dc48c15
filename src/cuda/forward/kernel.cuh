// Attention forward, dense, packed or paged, on tensor cores (sm_80 and newer).
//
// FlashAttention-2's partition (Dao 2023): a CTA owns one tile of 64 rows of one KV head and one run of
// its keys. A row is one query token of one query head; the rows of a tile run over the heads of the group
// first, so that every group ratio fills the tile and shares each tile of K and V. Warps own 16 rows each
// and never exchange a score.
//
// grid: x row tiles over the batch, y KV heads, z splits of the keys. With more than one split, partial
// results go to the workspace and combine_kernel merges them.
#pragma once

#include "cuda/forward/config.h"
#include "cuda/forward/row_tile.cuh"
#include "cuda/ptx/cp_async.h"
#include "cuda/tile/dropout.cuh"
#include "cuda/tile/load.cuh"
#include "cuda/tile/multiply.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/types.h"
#include "ops/forward_params.h"

namespace octavo::cuda {

// How one launch cuts the work.
struct ForwardPlan {
    int32_t num_row_tiles;  // over the batch; a bound when the queries are packed
    int32_t num_splits;
    // Partial results of each split, when there are several: [num_splits, total_q * num_q_heads, head_dim]
    // and [num_splits, total_q * num_q_heads].
    float* partial_out;
    float* partial_lse;
    // Whether every row starts on 16 bytes (on 4 bytes for out), so that it can move in such pieces.
    bool q_aligned, k_aligned, v_aligned, out_aligned;
};

template <class T, class Config>
struct ForwardShared {
    alignas(16) T q[Config::kRows * Config::kRowStride];
    alignas(16) T k[Config::kKeys * Config::kRowStride];
    alignas(16) T v[Config::kKeys * Config::kRowStride];
    // Where the rows of this tile of keys and of the next lie, in elements from k and v; or kZeros.
    static constexpr int64_t kZeros = INT64_MIN;
    int64_t k_offset[2][Config::kKeys];
    int64_t v_offset[2][Config::kKeys];
};

// One row of a CTA's tile: a query token of a query head.
struct Row {
    int64_t token;
    int32_t head;

    __device__ Row(int32_t row, int32_t kv_head, int32_t group_size)
        : token(row / group_size), head(kv_head * group_size + row % group_size) {}
};

// Writes this lane's part of one row of the result, or of this split's partial result.
template <class T, int kTiles>
__device__ __forceinline__ void store_row(const ForwardParams& p, const ForwardPlan& plan,
                                          const SequenceSlice& seq, int32_t batch, int32_t split, Row row,
                                          const float (&out)[kTiles][4], int half,
                                          const SoftmaxState& state) {
    const int lane = threadIdx.x % 32;
    const float inverse_sum = state.inverse_sum();
    if (plan.num_splits > 1) {
        const int64_t first_token = p.cu_seqlens_q ? p.cu_seqlens_q[batch] : int64_t{batch} * p.seqlen_q;
        const int64_t index = (split * p.total_q + first_token + row.token) * p.num_q_heads + row.head;
        float* const target = plan.partial_out + index * p.head_dim;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            const int column = 8 * i + 2 * (lane % 4);
            if (column >= p.head_dim) break;
            target[column] = out[i][2 * half] * inverse_sum;
            target[column + 1] = out[i][2 * half + 1] * inverse_sum;
        }
        if (lane % 4 == 0) plan.partial_lse[index] = state.lse();
        return;
    }
    T* const target = static_cast<T*>(p.out) + seq.out_begin + row.token * p.out_token_stride +
                      row.head * p.out_head_stride;
    const float scale = inverse_sum * p.out_scale;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const int column = 8 * i + 2 * (lane % 4);
        if (column >= p.head_dim) break;
        const float low = out[i][2 * half] * scale, high = out[i][2 * half + 1] * scale;
        if (plan.out_aligned) {
            *reinterpret_cast<uint32_t*>(target + column) = pack<T>(low, high);
        } else {
            target[column] = from_float<T>(low);
            target[column + 1] = from_float<T>(high);
        }
    }
    if (p.lse && lane % 4 == 0) {
        p.lse[seq.lse_begin + row.token * p.lse_token_stride + row.head * p.lse_head_stride] = state.lse();
    }
}

template <class T, int kHeadDim>
__global__ void __launch_bounds__(ForwardConfig<kHeadDim>::kThreads)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardPlan plan) {
    using Config = ForwardConfig<kHeadDim>;
    constexpr int kKeys = Config::kKeys;
    static_assert(2 * kKeys <= Config::kThreads, "one thread finds each row of K and of V");
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<ForwardShared<T, Config>*>(shared_bytes);

    const RowTile row_tile = find_row_tile<Config::kRows>(p, blockIdx.x);
    if (row_tile.batch < 0) return;
    const SequenceSlice seq = SequenceSlice::make(p, row_tile.batch);
    const int32_t kv_head = blockIdx.y, split = blockIdx.z;
    const int32_t group_size = p.group_size();
    const int32_t num_rows = seq.seqlen_q * group_size;
    const int32_t last_row = min(row_tile.first_row + Config::kRows, num_rows) - 1;

    // The keys that some row of the tile sees, and this split's share of their tiles.
    const int32_t first_q_pos = seq.q_pos(row_tile.first_row / group_size);
    const int32_t last_q_pos = seq.q_pos(last_row / group_size);
    const KeyTiles tiles(seq.see, first_q_pos, last_q_pos, kKeys);
    const int32_t tiles_per_split = (tiles.count + plan.num_splits - 1) / plan.num_splits;
    const int32_t tile_begin = min(split * tiles_per_split, tiles.count);
    const int32_t tile_end = min(tile_begin + tiles_per_split, tiles.count);

    const T* const q = static_cast<const T*>(p.q) + seq.q_begin;
    const T* const k = static_cast<const T*>(p.k) + seq.k_begin + kv_head * p.k_head_stride;
    const T* const v = static_cast<const T*>(p.v) + seq.v_begin + kv_head * p.v_head_stride;
    const int32_t* const pages = p.paged() ? p.page_table + row_tile.batch * p.page_table_stride : nullptr;
    auto find_keys = [&](int32_t tile) {
        const int thread = threadIdx.x;
        if (thread >= 2 * kKeys) return;
        const bool is_k = thread < kKeys;
        const int32_t row = is_k ? thread : thread - kKeys, key = tiles.start(tile) + row;
        const int64_t outer_stride = is_k ? p.k_outer_stride : p.v_outer_stride;
        const int64_t token_stride = is_k ? p.k_token_stride : p.v_token_stride;
        int64_t offset = shared.kZeros;
        if (tiles.needed(key)) {
            offset = pages ? pages[key / p.page_size] * outer_stride + key % p.page_size * token_stride
                           : key * token_stride;
        }
        (is_k ? shared.k_offset : shared.v_offset)[tile % 2][row] = offset;
    };
    auto load_keys = [&](T* target, const T* base, const int64_t (&offsets)[kKeys], bool aligned) {
        load_rows<Config, kKeys>(target, p.head_dim, aligned, static_cast<const T*>(p.q), [&](int i) {
            return offsets[i] == shared.kZeros ? nullptr : base + offsets[i];
        });
        ptx::cp_async_commit();
    };

    if (tile_begin < tile_end) {
        find_keys(tile_begin);
        load_rows<Config, Config::kRows>(
            shared.q, p.head_dim, plan.q_aligned, static_cast<const T*>(p.q), [&](int i) -> const T* {
                if (row_tile.first_row + i >= num_rows) return nullptr;
                const Row row(row_tile.first_row + i, kv_head, group_size);
                return q + row.token * p.q_token_stride + row.head * p.q_head_stride;
            });
        __syncthreads();  // the offsets are there
        load_keys(shared.k, k, shared.k_offset[tile_begin % 2], plan.k_aligned);
    }

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t lane_row = row_tile.first_row + 16 * warp + lane / 4;  // and eight further
    LaneRows rows;
    DropoutRows dropout_rows;
    SoftmaxState state[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Row row(lane_row + 8 * half, kv_head, group_size);
        rows.q_pos[half] = seq.q_pos(row.token);
        dropout_rows.head[half] = p.dropout.head(row_tile.batch, p.num_q_heads, row.head);
        dropout_rows.query[half] = row.token;
        const bool has_slope = p.alibi_slopes && lane_row + 8 * half < num_rows;
        rows.slope_log2[half] =
            has_slope ? p.alibi_slopes[row_tile.batch * p.alibi_batch_stride + row.head] * kLog2e : 0.0f;
    }
    const ScoreTransform transform = ScoreTransform::make(p.softmax_scale, p.softcap);
    float out[kHeadDim / 8][4] = {};

    for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
        const int32_t first_key = tiles.start(tile);
        ptx::cp_async_wait<0>();
        __syncthreads();  // q and k have arrived; every warp is done with the last v and its offsets
        load_keys(shared.v, v, shared.v_offset[tile % 2], plan.v_aligned);
        if (tile + 1 < tile_end) find_keys(tile + 1);

        float scores[kKeys / 8][4];
        multiply_q_k<T, Config>(scores, shared.q + 16 * warp * Config::kRowStride, shared.k);
        const bool masked = !KeyTiles::all_visible(seq.see, first_q_pos, last_q_pos, first_key, kKeys);
        score_tile(scores, transform, rows, p.alibi_slopes != nullptr, seq.see, masked, first_key);
        softmax_tile(scores, state, out);
        if (p.dropout.any()) {
            drop_weights<kKeys / 8>(p.dropout, dropout_rows, first_key,
                                    [&](int i, int j) -> float& { return scores[i][j]; });
        }

        ptx::cp_async_wait<0>();
        __syncthreads();  // v and the next offsets have arrived; every warp is done with k
        if (tile + 1 < tile_end) load_keys(shared.k, k, shared.k_offset[(tile + 1) % 2], plan.k_aligned);
        multiply_p_v<T, Config>(out, scores, shared.v);
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        state[half].sum = row_sum(state[half].sum);
        if (lane_row + 8 * half >= num_rows) continue;
        store_row<T>(p, plan, seq, row_tile.batch, split, Row(lane_row + 8 * half, kv_head, group_size), out,
                     half, state[half]);
    }
}

}  // namespace octavo::cuda
