// Attention forward, dense, packed or paged, on tensor cores (sm_80 and newer).
//
// FlashAttention-2's partition (Dao 2023): a CTA owns one tile of rows of one KV head and one split of its
// keys. A row is one query token of one query head; the rows of a tile run over the heads of the group first,
// so that every group ratio fills the tile and shares each tile of K and V. Warps own rows of their own and
// never exchange a score, except for head dims above 256, where two warps share their rows. K and V arrive a
// whole tile ahead; where there is no room for that, V arrives during Q K^T, and the next K during softmax
// and P V. Page: docs/kernels/sm80_attention.md.
//
// grid: x row tiles over the batch, y KV heads, z splits of the keys. With more than one split, partial
// results go to the workspace and combine_splits_kernel combines them.
#pragma once

#include "cuda/ptx/warpgroup.h"
#include "cuda/sm80_attention/find_row_tile.cuh"
#include "cuda/sm80_attention/key_rows.cuh"
#include "cuda/sm80_attention/mask_rows.cuh"
#include "cuda/sm80_attention/parameters.h"
#include "cuda/sm80_attention/tiles.h"
#include "cuda/tile/dropout.cuh"
#include "cuda/tile/kept_blocks.cuh"
#include "cuda/tile/multiply.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/types.h"
#include "params/attention_params.h"

#include <type_traits>

namespace octavo::cuda {

// Each lane's scores, for the same lane of the warp that shares its rows. With one stage they lie where the
// keys were, with which every warp is done by then.
template <class Config, bool kUsed = (Config::kColumnWarps > 1 && Config::kStages > 1)>
struct SharedScores {};
template <class Config>
struct SharedScores<Config, true> {
    alignas(16) float4 of_lane[Config::kWarps][Config::kRowTiles * Config::kKeys / 8][32];
};

// Adds up the scores of the two warps that share rows. Both get the same sums.
template <class Config>
__device__ __forceinline__ void add_scores(float (&scores)[Config::kRowTiles][Config::kKeys / 8][4],
                                           float4 (*of_lane)[Config::kRowTiles * Config::kKeys / 8][32],
                                           int warp) {
    static_assert(Config::kColumnWarps == 2);
    constexpr int kGroups = Config::kKeys / 8;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Config::kRowTiles * kGroups; ++i) {
        const float (&own)[4] = scores[i / kGroups][i % kGroups];
        of_lane[warp][i][lane] = make_float4(own[0], own[1], own[2], own[3]);
    }
    ptx::named_barrier_sync(1 + warp / 2, 64);
#pragma unroll
    for (int i = 0; i < Config::kRowTiles * kGroups; ++i) {
        const float4 other = of_lane[warp ^ 1][i][lane];
        float (&own)[4] = scores[i / kGroups][i % kGroups];
        own[0] += other.x;
        own[1] += other.y;
        own[2] += other.z;
        own[3] += other.w;
    }
}

template <class T, class Config, bool kHasRanges>
struct Sm80Shared {
    using Row = std::conditional_t<kHasRanges, RangedRow, TileRow>;
    alignas(16) T q[Config::kRows * Config::kRowStride];  // in the end each warp's result, in its own rows
    alignas(16) T k[Config::kStages][Config::kKeys * Config::kRowStride];
    alignas(16) T v[Config::kStages][Config::kKeys * Config::kRowStride];
    Row rows[Config::kRows];
    int32_t pages[Config::kKeys];
    SharedScores<Config> scores;
};

// Writes the result of one warp's rows and columns, or this split's partial result. `q_rows` is room for them
// in shared memory.
template <class T, class Config, class Slice, class Row>
__device__ __forceinline__ void store_rows(const AttentionParams& p, const Sm80Launch& plan, const Slice& seq,
                                           int32_t batch, int32_t split, const Row* rows, int32_t num_rows,
                                           T* q_rows, int first_column,
                                           const float (&out)[Config::kRowTiles][Config::kWarpColumns / 8][4],
                                           const RowSoftmax<Config::kRowTiles>& softmax) {
    const int lane = threadIdx.x % 32;
    const bool partial = plan.num_splits > 1;
    const int64_t first_token = p.cu_seqlens_q ? p.cu_seqlens_q[batch] : int64_t{batch} * p.seqlen_q;
    __syncwarp();  // every lane has read the queries
    for_each_row<Config::kRowTiles>(rows, [&](const TileRow& row, int r) {
        SoftmaxState state = softmax.state(r / 2, r % 2);
        const int row_index = 8 * r + lane / 4;
        float factor = partial ? 1.0f : p.out_scale;
        if (p.sinks && !partial && row_index < num_rows) factor *= state.add_sink(p.sinks[row.head] * kLog2e);
        const float scale = state.inverse_sum() * factor;
        auto pair = [&](int i) {
            const float (&from)[4] = out[r / 2][i];
            return float2{from[2 * (r % 2)] * scale, from[2 * (r % 2) + 1] * scale};
        };
        if (!partial) {
            T* const target = q_rows + row_index * Config::kRowStride + 2 * (lane % 4);
#pragma unroll
            for (int i = 0; i < Config::kWarpColumns / 8; ++i)
                *reinterpret_cast<uint32_t*>(target + 8 * i) = pack<T>(pair(i).x, pair(i).y);
        }
        if (row_index >= num_rows) return;
        if (partial) {
            const int64_t index = (split * p.total_q + first_token + row.token) * p.num_q_heads + row.head;
            float* const target = plan.partial_out + index * p.head_dim_v + first_column + 2 * (lane % 4);
#pragma unroll
            for (int i = 0; i < Config::kWarpColumns / 8; ++i)
                if (first_column + 8 * i < p.head_dim_v) *reinterpret_cast<float2*>(target + 8 * i) = pair(i);
            if (lane % 4 == 0 && first_column == 0) plan.partial_lse[index] = state.lse();
        } else if (p.lse && lane % 4 == 0 && first_column == 0) {
            p.lse[seq.lse_begin + row.token * p.lse_token_stride + row.head * p.lse_head_stride] =
                state.lse();
        }
    });
    if (partial) return;
    __syncwarp();
    const int32_t num_columns = min(p.head_dim_v - first_column, Config::kWarpColumns);
    const int chunk = plan.out_aligned ? 16 / sizeof(T) : 1;
    const int lanes = plan.out_aligned ? Config::kLanesPerRow : 32;
    for (int i = lane / lanes; i < num_rows; i += 32 / lanes) {
        const TileRow row = rows[i];
        T* const target = static_cast<T*>(p.out) + seq.out_begin + row.token * p.out_token_stride +
                          row.head * p.out_head_stride + first_column;
        const T* const source = q_rows + i * Config::kRowStride;
        for (int column = lane % lanes * chunk; column < num_columns; column += lanes * chunk) {
            if (plan.out_aligned) {
                *reinterpret_cast<uint4*>(target + column) = *reinterpret_cast<const uint4*>(source + column);
            } else {
                target[column] = source[column];
            }
        }
    }
}

// The keys and values at the sequence and head of a CTA.
template <class T, Sm80Feature kFeature, class Slice>
__device__ __forceinline__ auto key_array(const AttentionParams& p, const Sm80Launch& plan, const Slice& seq,
                                          int32_t kv_head) {
    if constexpr (reads_codes(kFeature)) {
        return CodeArray::keys(p, kv_head);
    } else {
        return KeyArray<T>{static_cast<const T*>(p.k) + seq.k_begin + kv_head * p.k_head_stride,
                           p.k_outer_stride, p.k_token_stride, plan.k_aligned};
    }
}
template <class T, Sm80Feature kFeature, class Slice>
__device__ __forceinline__ auto value_array(const AttentionParams& p, const Sm80Launch& plan,
                                            const Slice& seq, int32_t kv_head) {
    if constexpr (reads_codes(kFeature)) {
        return CodeArray::values(p, kv_head);
    } else {
        return KeyArray<T>{static_cast<const T*>(p.v) + seq.v_begin + kv_head * p.v_head_stride,
                           p.v_outer_stride, p.v_token_stride, plan.v_aligned};
    }
}

// Dropout, codes, block masks and ranges have kernels of their own: as a branch of the plain kernel, dropout
// made it spill registers.
template <class T, class Config, Sm80Feature kFeature>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    sm80_attention_kernel(const __grid_constant__ AttentionParams p,
                          const __grid_constant__ Sm80Launch plan) {
    constexpr int kKeys = Config::kKeys;
    constexpr bool kBlocks = kFeature == Sm80Feature::blocks;
    constexpr bool kRanges = has_ranges(kFeature);
    using Slice = std::conditional_t<kRanges, RangedSlice, SequenceSlice>;
    using Shared = Sm80Shared<T, Config, kRanges>;
    const bool drops =
        kFeature == Sm80Feature::dropout || ((kBlocks || kFeature == Sm80Feature::ranges) && p.dropout.any());
    static_assert(Config::kRows <= Config::kThreads, "one thread finds each row");
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<Shared*>(shared_bytes);

    const RowTile row_tile = find_row_tile<Config::kRows>(p, plan.sequence_tiles, blockIdx.x);
    if (row_tile.batch < 0) return;
    const Slice seq = Slice::make(p, row_tile.batch);
    const int32_t kv_head = blockIdx.y, split = blockIdx.z;
    const int32_t group_size = plan.group_size.divisor;
    const int32_t num_rows = min(seq.seqlen_q * group_size - row_tile.first_row, Config::kRows);
    auto token_of = [&](int32_t row) { return plan.group_size.quotient(row_tile.first_row + row); };
    auto head_of = [&](int32_t row, int32_t token) {
        return kv_head * group_size + row_tile.first_row + row - token * group_size;
    };

    // The tiles of keys that some row sees, and those of them that this split owns.
    const KeyTiles tiles(seq.see, seq.q_pos(token_of(0)), seq.q_pos(token_of(num_rows - 1)), kKeys);
    const int32_t tiles_per_split = (tiles.count + plan.num_splits - 1) / plan.num_splits;
    const int32_t tile_begin = min(split * tiles_per_split, tiles.count);
    const int32_t tile_end = min(tile_begin + tiles_per_split, tiles.count);

    // The first tile from `tile` on that some row looks at; without a block mask that is `tile`.
    const auto kept_from = [&](int32_t tile) {
        if constexpr (kBlocks) {
            const KeptBlocks kept(p, row_tile.batch, kv_head * group_size, group_size, token_of(0),
                                  token_of(num_rows - 1));
            while (tile < tile_end && !kept.any(tiles.start(tile), tiles.start(tile))) ++tile;
        }
        return tile;
    };
    const int32_t first_tile = kept_from(tile_begin);

    const T* const q = static_cast<const T*>(p.q);
    const auto k = key_array<T, kFeature>(p, plan, seq, kv_head);
    const auto v = value_array<T, kFeature>(p, plan, seq, kv_head);
    KeyRows<T, Config> keys(
        tiles, p.paged() ? p.page_table.from(row_tile.batch * p.page_table_stride) : IndexArray{},
        plan.page_size, shared.pages, q);

    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler then knows it to be warp-uniform
    const int warp_row = warp / Config::kColumnWarps * Config::kWarpRows;  // the warp's first row
    const int first_column = warp % Config::kColumnWarps * Config::kWarpColumns;
    const int num_warp_rows = min(num_rows - warp_row, Config::kWarpRows);
    const typename Shared::Row* const rows = shared.rows + warp_row;
    const WarpView view(seq.see, num_warp_rows > 0, seq.q_pos(token_of(warp_row)),
                        seq.q_pos(token_of(max(warp_row + num_warp_rows - 1, 0))),
                        p.is_tree(seq.seqlen_q) ? seq.q_pos(0) : INT32_MAX);
    const ScoreTransform transform = ScoreTransform::make(p.softmax_scale, p.softcap);
    const bool has_alibi = p.alibi_slopes != nullptr;
    const bool is_symmetric = kFeature != Sm80Feature::none && p.alibi_symmetric;
    // If nothing comes between product and exponential, the scale is part of the exponential. The maximum is
    // then taken before scaling, so the scale has to be positive.
    const bool plain = !transform.has_softcap && !has_alibi && transform.inner > 0.0f;
    RowSoftmax<Config::kRowTiles> softmax(plain ? transform.inner : 1.0f);
    float out[Config::kRowTiles][Config::kWarpColumns / 8][4] = {};
    uint32_t q_address = rows_address<Config>(shared.q + warp_row * Config::kRowStride + first_column);
    uint32_t k_address = columns_address<Config>(shared.k[0] + first_column);
    uint32_t v_address = rows_address<Config>(shared.v[0] + first_column);
    uint32_t k_place = keys.place(shared.k[0]), v_place = keys.place(shared.v[0]);
    pin_in_register(q_address);
    pin_in_register(k_address);
    pin_in_register(v_address);
    pin_in_register(k_place);
    pin_in_register(v_place);

    constexpr int kStageBytes = sizeof(T) * kKeys * Config::kRowStride;
    constexpr bool kDouble = Config::kStages == 2;
    if (first_tile < tile_end) {
        if (p.head_dim < Config::kHeadDim) {
            zero_columns<Config, Config::kRows>(shared.q, p.head_dim);
            zero_columns<Config, Config::kStages * kKeys>(shared.k[0], p.head_dim);
        }
        keys.find(first_tile);
        ptx::cp_async_commit();
        if (p.paged()) {
            ptx::cp_async_wait<0>();
            __syncwarp();
        }
        keys.copy(first_tile, k_place, k, p.head_dim);
        using Copy = TileCopy<T, Config, Config::kRows>;
        const T* source[Copy::kCount];
        uint32_t valid = 0;
#pragma unroll
        for (int i = 0; i < Copy::kCount; ++i) {
            const int32_t row = Copy::row() + i * Copy::kRowsAtOnce, token = token_of(row);
            const bool inside = row < num_rows;
            valid |= inside << i;
            source[i] = q;
            if (inside) {
                source[i] += seq.q_begin + token * p.q_token_stride + head_of(row, token) * p.q_head_stride +
                             Copy::column();
            }
        }
        Copy::template run<false>(
            ptx::shared_address(shared.q + Copy::row() * Config::kRowStride + Copy::column()), source, valid,
            Copy::column(), p.head_dim, plan.q_aligned);
        if constexpr (kDouble) {
            keys.copy(first_tile, v_place, v, p.head_dim_v);
            const int32_t next = kept_from(first_tile + 1);
            if (next < tile_end) keys.find(next);
        }
        ptx::cp_async_commit();
    }
    if (threadIdx.x < num_rows) {
        const int32_t token = token_of(threadIdx.x), head = head_of(threadIdx.x, token);
        const float* const slopes =
            has_alibi ? p.alibi_slopes + row_tile.batch * p.alibi_batch_stride : nullptr;
        TileRow& row = shared.rows[threadIdx.x];
        row = {token, head, slopes ? slopes[head] * kLog2e : 0.0f, seq.see.window_begin(seq.q_pos(token))};
        if constexpr (kRanges) shared.rows[threadIdx.x].window_end = seq.see.window_end(seq.q_pos(token));
    }
    if (first_tile >= tile_end) __syncthreads();  // before shared.rows is read; the loop has its own barrier
    int32_t num_visited = 0;                      // tiles, with a block mask
    for (int32_t tile = first_tile, next; tile < tile_end; tile = next) {
        const int32_t first_key = tiles.start(tile);
        next = kept_from(tile + 1);
        const bool more = next < tile_end;
        const uint32_t stage = kDouble ? (kBlocks ? num_visited++ : tile - tile_begin) % 2 * kStageBytes : 0;
        ptx::cp_async_wait<0>();
        __syncthreads();  // k has arrived; every warp is done with the last v
        if constexpr (kDouble) {
            if (more) {
                keys.copy(next, k_place + (kStageBytes - stage), k, p.head_dim);
                keys.copy(next, v_place + (kStageBytes - stage), v, p.head_dim_v);
                const int32_t behind = kept_from(next + 1);
                if (behind < tile_end) keys.find(behind);
            }
        } else {
            keys.copy(tile, v_place, v, p.head_dim_v);
            if (more) keys.find(next);
        }
        ptx::cp_async_commit();

        bool seen = view.sees_any(first_key, kKeys);
        uint32_t hidden = 0;  // the block mask hides the tile from those of this lane's rows whose bit is set
        if constexpr (kBlocks) {
            bool kept = false;
            for_each_row<Config::kRowTiles>(rows, [&](const TileRow& row, int r) {
                if (8 * r + static_cast<int>(threadIdx.x) % 32 / 4 >= num_warp_rows) return;
                const bool sees = p.block_mask.sees(row_tile.batch, row.head, row.token, first_key);
                kept |= sees;
                hidden |= !sees << r;
            });
            seen = __any_sync(~0u, kept) && seen;
        }
        constexpr int kRowsOfLane = 2 * Config::kRowTiles;
        DropoutMask<kRowsOfLane, kKeys / 8> kept;
        if (!kBlocks && drops && !p.dropout.any()) {
            kept.keep_all();
        } else if (drops && seen) {
            const uint64_t first_head = p.dropout.head(row_tile.batch, p.num_q_heads, 0);
            kept.draw(p.dropout, first_key, [&](int r) {
                const TileRow& row = rows[8 * r + threadIdx.x % 32 / 4];
                return DropoutRow{first_head + row.head, row.token};
            });
        }
        float scores[Config::kRowTiles][kKeys / 8][4];
        if (seen) multiply_q_k<T, Config>(scores, q_address, k_address + stage);
        if constexpr (kDouble && Config::kColumnWarps > 1) {
            if (seen) add_scores<Config>(scores, shared.scores.of_lane, warp);
        }
        if constexpr (!kDouble) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // v has arrived; every warp is done with k
            if constexpr (Config::kColumnWarps > 1) {
                using Scores = SharedScores<Config, true>;
                static_assert(sizeof(Scores) <= sizeof(shared.k));
                if (seen) add_scores<Config>(scores, reinterpret_cast<Scores*>(shared.k[0])->of_lane, warp);
                __syncthreads();  // every warp has read the scores there; the next k may come
                if (more) zero_columns<Config, kKeys>(shared.k[0], p.head_dim);  // scores overwrote them
            }
            if (more) keys.copy(next, k_place, k, p.head_dim);
            ptx::cp_async_commit();
        }
        if (!seen) continue;
        if (!plain)
            transform_scores(scores, transform, has_alibi, is_symmetric, rows, seq.q_pos(0), first_key);
        if (!view.sees_all(first_key, kKeys)) {
            mask_scores(scores, view.see, rows, seq.q_pos(0), first_key);
            if (p.is_tree(seq.seqlen_q))
                mask_tree(scores, p, seq, p.first_token(row_tile.batch), rows, first_key);
        }
        if constexpr (kBlocks) {
            if (hidden != 0) hide_rows(scores, hidden);
        }
        softmax.raise(scores, out);
#pragma unroll
        for (int key = 0; key < kKeys; key += 16) {
            uint32_t weights[Config::kRowTiles][4];
#pragma unroll
            for (int t = 0; t < Config::kRowTiles; ++t) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int half = j % 2, group = key / 8 + j / 2;
                    weights[t][j] = softmax.template weigh<T>(scores, t, group, half);
                    if (drops) weights[t][j] = kept.apply(weights[t][j], 2 * t + half, group);
                }
            }
            multiply_p_v<T, Config>(out, weights, v_address + stage + sizeof(T) * key * Config::kRowStride);
        }
    }
    store_rows<T, Config>(p, plan, seq, row_tile.batch, split, rows, num_warp_rows,
                          shared.q + warp_row * Config::kRowStride + first_column, first_column, out,
                          softmax);
}

}  // namespace octavo::cuda
